// What shuffles, votes and warp reductions compute once all lanes have met.
#include <bit>

#include "device_functions.h"
#include "emulator.h"

namespace pagedkv::emulator {
namespace {

struct ShuffleArgument {
  ShuffleMode mode;
  uint64_t bits, result;
  int operand, width;
};

// The lane that lane_idx reads from, as PTX ISA "shfl.sync" defines it: out of its segment of `width` lanes a
// lane reads itself.
int source_lane(const ShuffleArgument& argument, int lane_idx) {
  const int segment_begin = lane_idx & ~(argument.width - 1), segment_end = segment_begin + argument.width;
  int source = lane_idx;
  switch (argument.mode) {
    case ShuffleMode::index:
      source = segment_begin + (argument.operand & (argument.width - 1));
      break;
    case ShuffleMode::up:
      source = lane_idx - argument.operand;
      break;
    case ShuffleMode::down:
      source = lane_idx + argument.operand;
      break;
    case ShuffleMode::exclusive_or:
      // A lane may reach back into an earlier segment, but not forward into a later one.
      source = lane_idx ^ argument.operand;
      return source < segment_end ? source : lane_idx;
  }
  return source >= segment_begin && source < segment_end ? source : lane_idx;
}

void run_shuffle(const Collective& collective) {
  for (int lane_idx = 0; lane_idx < 32; ++lane_idx) {
    if (!collective.has(lane_idx)) continue;
    auto& argument = collective.argument<ShuffleArgument>(lane_idx);
    const int source = source_lane(argument, lane_idx);
    if (source < 0 || source > 31 || !collective.has(source)) {
      fault(collective.place, "%s: lane %d reads from lane %d, which is not in mask 0x%08x", collective.name,
            lane_idx, source, collective.mask);
    }
    argument.result = collective.argument<ShuffleArgument>(source).bits;
  }
}

struct BallotArgument {
  bool predicate;
  uint32_t result;
};

void run_ballot(const Collective& collective) {
  uint32_t result = 0;
  for (int lane_idx = 0; lane_idx < 32; ++lane_idx) {
    if (collective.has(lane_idx) && collective.argument<BallotArgument>(lane_idx).predicate)
      result |= 1u << lane_idx;
  }
  for (int lane_idx = 0; lane_idx < 32; ++lane_idx) {
    if (collective.has(lane_idx)) collective.argument<BallotArgument>(lane_idx).result = result;
  }
}

struct MatchArgument {
  uint64_t bits;
  uint32_t result;
};

void run_match_any(const Collective& collective) {
  for (int lane_idx = 0; lane_idx < 32; ++lane_idx) {
    if (!collective.has(lane_idx)) continue;
    auto& argument = collective.argument<MatchArgument>(lane_idx);
    for (int other_idx = 0; other_idx < 32; ++other_idx) {
      const bool equal =
          collective.has(other_idx) && collective.argument<MatchArgument>(other_idx).bits == argument.bits;
      if (equal) argument.result |= 1u << other_idx;
    }
  }
}

struct ReduceArgument {
  ReduceMode mode;
  int64_t value, result;
};

int64_t combine(ReduceMode mode, int64_t a, int64_t b) {
  switch (mode) {
    case ReduceMode::add:
      return a + b;
    case ReduceMode::min:
      return a < b ? a : b;
    case ReduceMode::max:
      return a < b ? b : a;
    case ReduceMode::bit_and:
      return a & b;
    case ReduceMode::bit_or:
      return a | b;
    case ReduceMode::bit_xor:
      return a ^ b;
  }
  return a;
}

void run_reduce(const Collective& collective) {
  const int first_lane = std::countr_zero(collective.mask);
  int64_t result = collective.argument<ReduceArgument>(first_lane).value;
  for (int lane_idx = first_lane + 1; lane_idx < 32; ++lane_idx) {
    if (!collective.has(lane_idx)) continue;
    const auto& argument = collective.argument<ReduceArgument>(lane_idx);
    result = combine(argument.mode, result, argument.value);
  }
  for (int lane_idx = first_lane; lane_idx < 32; ++lane_idx) {
    if (collective.has(lane_idx)) collective.argument<ReduceArgument>(lane_idx).result = result;
  }
}

}  // namespace

uint64_t shuffle(ShuffleMode mode, uint32_t mask, uint64_t bits, int operand, int width, const char* name,
                 const Place& place) {
  if (width < 1 || width > 32 || !std::has_single_bit(static_cast<uint32_t>(width))) {
    fault(place, "%s: width %d; supported: 1, 2, 4, 8, 16, 32", name, width);
  }
  ShuffleArgument argument{mode, bits, 0, operand, width};
  warp_collective(mask, name, &argument, run_shuffle, MemoryOrder::none, place);
  return argument.result;
}

uint32_t ballot(const char* name, uint32_t mask, bool predicate, const Place& place) {
  BallotArgument argument{predicate, 0};
  warp_collective(mask, name, &argument, run_ballot, MemoryOrder::none, place);
  return argument.result;
}

uint32_t match_any(uint32_t mask, uint64_t bits, const Place& place) {
  MatchArgument argument{bits, 0};
  warp_collective(mask, "__match_any_sync", &argument, run_match_any, MemoryOrder::none, place);
  return argument.result;
}

int64_t reduce(ReduceMode mode, uint32_t mask, int64_t value, const char* name, const Place& place) {
  ReduceArgument argument{mode, value, 0};
  warp_collective(mask, name, &argument, run_reduce, MemoryOrder::none, place);
  return argument.result;
}

}  // namespace pagedkv::emulator
