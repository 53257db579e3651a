// The instructions whose work does not belong into every kernel that uses them.
#include "machine.h"

#include <cfenv>

namespace pagedkv::emulator::ptx {
namespace {

constexpr uint64_t FIRST_PAGE = 4096;  // no memory lies there: an address in it is an offset from null

struct ShuffleArgument {
  ShuffleMode mode;
  uint32_t value, operand, clamp_and_segment;
  uint32_t result;
  bool in_range;
};

// PTX ISA, "shfl.sync": the lane to read from, and whether it lies within the segment.
int source_lane(const ShuffleArgument& argument, int lane_idx, bool& in_range) {
  const int operand = static_cast<int>(argument.operand & 31);
  const int clamp = static_cast<int>(argument.clamp_and_segment & 31);
  const int segment = static_cast<int>(argument.clamp_and_segment >> 8 & 31);
  const int last = (lane_idx & segment) | (clamp & ~segment), first = lane_idx & segment;
  int source = lane_idx;
  switch (argument.mode) {
    case ShuffleMode::up:
      source = lane_idx - operand;
      break;
    case ShuffleMode::down:
      source = lane_idx + operand;
      break;
    case ShuffleMode::exclusive_or:
      source = lane_idx ^ operand;
      break;
    case ShuffleMode::index:
      source = first | (operand & ~segment);
      break;
  }
  in_range = argument.mode == ShuffleMode::up ? source >= last : source <= last;
  return in_range ? source : lane_idx;
}

void run_shuffle(const Collective& collective) {
  for (int lane_idx = 0; lane_idx < 32; ++lane_idx) {
    if (!collective.has(lane_idx)) continue;
    auto& argument = collective.argument<ShuffleArgument>(lane_idx);
    const int source = source_lane(argument, lane_idx, argument.in_range);
    if (!collective.has(source)) {
      fault(collective.place, "%s: lane %d reads from lane %d, which is not in mask 0x%08x", collective.name,
            lane_idx, source, collective.mask);
    }
    argument.result = collective.argument<ShuffleArgument>(source).value;
  }
}

}  // namespace

void check_address(uint64_t address, size_t num_bytes, const Place& place) {
  if (address % num_bytes != 0) {
    fault(place, "address 0x%llx is not aligned to %zu bytes", static_cast<unsigned long long>(address),
          num_bytes);
  }
  if (address < FIRST_PAGE) {
    fault(place, "address 0x%llx is a null pointer's", static_cast<unsigned long long>(address));
  }
  const unsigned char* begin = reinterpret_cast<const unsigned char*>(address);
  const Cta& cta = *current_thread->cta;
  if (begin + num_bytes > cta.shared && begin < cta.shared + cta.shared_bytes) {
    check_shared_access("a generic access of PTX", begin, num_bytes, place);
  }
}

// The library's function, which obeys the rounding mode; the volatile operands keep it between the two calls.
float fma_down(float a, float b, float c) {
  const int mode = std::fegetround();
  std::fesetround(FE_DOWNWARD);
  const volatile float operands[3] = {a, b, c};
  const volatile float result = std::fma(operands[0], operands[1], operands[2]);
  std::fesetround(mode);
  return result;
}

uint32_t shfl(ShuffleMode mode, uint32_t value, uint32_t operand, uint32_t clamp_and_segment, uint32_t mask,
              bool* in_range, Place place) {
  ShuffleArgument argument{mode, value, operand, clamp_and_segment, 0, false};
  warp_collective(mask, "shfl.sync", &argument, run_shuffle, MemoryOrder::none, place);
  if (in_range != nullptr) *in_range = argument.in_range;
  return argument.result;
}

}  // namespace pagedkv::emulator::ptx
