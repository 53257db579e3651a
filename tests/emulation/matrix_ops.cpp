#include "matrix_ops.h"

#include <algorithm>
#include <bit>

namespace pagedkv::emulator {
namespace {

constexpr uint32_t ALL_LANES = 0xffffffffu;

// These instructions are .aligned: the whole warp must be there.
void whole_warp_collective(const char* name, void* argument, WarpOperation operation, const Place& place) {
  const dim3& cta = current_thread->cta->cta_dim;
  const int num_threads = static_cast<int>(cta.x * cta.y * cta.z);
  if (current_thread->warp_idx * 32 + 32 > num_threads) {
    fault(place, "%s needs a whole warp, and the last one of a CTA of %d threads is not", name, num_threads);
  }
  warp_collective(ALL_LANES, name, argument, operation, MemoryOrder::none, place);
}

uint32_t pack(uint16_t low, uint16_t high) { return uint32_t{low} | uint32_t{high} << 16; }

struct LdmatrixArgument {
  int num_matrices;
  bool transposed;
  const MatrixRow* row;
  const void* row_address;
  uint32_t* registers;
};

// Eight rows of 16 bytes are read at once when they lie in different sixteen-byte columns of the 128-byte
// wide banks; rows that share a column wait for each other, unless they are the same row.
int count_wavefronts(const Collective& collective, int matrix_idx) {
  int num_wavefronts = 0;
  for (uintptr_t column = 0; column < 8; ++column) {
    uintptr_t distinct[8];
    int num_distinct = 0;
    for (int row_idx = 0; row_idx < 8; ++row_idx) {
      const auto& argument = collective.argument<LdmatrixArgument>(matrix_idx * 8 + row_idx);
      const auto chunk = reinterpret_cast<uintptr_t>(argument.row_address) / 16;
      if (chunk % 8 != column ||
          std::find(distinct, distinct + num_distinct, chunk) != distinct + num_distinct)
        continue;
      distinct[num_distinct++] = chunk;
    }
    num_wavefronts = std::max(num_wavefronts, num_distinct);
  }
  return num_wavefronts;
}

void run_ldmatrix(const Collective& collective) {
  const auto& first = collective.argument<LdmatrixArgument>(0);
  for (int matrix_idx = 0; matrix_idx < first.num_matrices; ++matrix_idx) {
    const auto element = [&](int row_idx, int column) {
      const auto& argument = collective.argument<LdmatrixArgument>(matrix_idx * 8 + row_idx);
      return argument.row->elements[column];
    };
    for (int lane_idx = 0; lane_idx < 32; ++lane_idx) {
      const int group = lane_idx / 4, pair = lane_idx % 4 * 2;
      collective.argument<LdmatrixArgument>(lane_idx).registers[matrix_idx] =
          first.transposed ? pack(element(pair, group), element(pair + 1, group))
                           : pack(element(group, pair), element(group, pair + 1));
    }
    collective.counters->ldmatrix_wavefronts +=
        static_cast<uint64_t>(count_wavefronts(collective, matrix_idx));
  }
  ++collective.counters->ldmatrix;
}

struct MovmatrixArgument {
  uint32_t source, result;
};

void run_movmatrix(const Collective& collective) {
  const auto element = [&](int row_idx, int column) {
    const uint32_t pair = collective.argument<MovmatrixArgument>(row_idx * 4 + column / 2).source;
    return static_cast<uint16_t>(column % 2 == 0 ? pair : pair >> 16);
  };
  for (int lane_idx = 0; lane_idx < 32; ++lane_idx) {
    const int group = lane_idx / 4, pair = lane_idx % 4 * 2;
    collective.argument<MovmatrixArgument>(lane_idx).result =
        pack(element(pair, group), element(pair + 1, group));
  }
}

// Exact, by moving the bits to float32's place and correcting the exponent's bias; infinities and NaN keep
// theirs.
float widen_float16(uint16_t bits) {
  const uint32_t magnitude = bits & 0x7fffu;
  const float finite = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  const uint32_t widened =
      magnitude >= 0x7c00u ? 0x7f800000u | (magnitude & 0x3ffu) << 13 : std::bit_cast<uint32_t>(finite);
  return std::bit_cast<float>(widened | (bits & 0x8000u) << 16);
}

float widen_bfloat16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

struct MmaArgument {
  const uint32_t *a, *b;
  const float* c;
  float* d;
};

template <float (*WIDEN)(uint16_t)>
void run_mma(const Collective& collective) {
  float a[16][16], b[16][8], d[16][8];
  const auto unpack = [](uint32_t packed, float& low, float& high) {
    low = WIDEN(static_cast<uint16_t>(packed));
    high = WIDEN(static_cast<uint16_t>(packed >> 16));
  };
  for (int lane_idx = 0; lane_idx < 32; ++lane_idx) {
    const auto& lane = collective.argument<MmaArgument>(lane_idx);
    const int group = lane_idx / 4, pair = lane_idx % 4 * 2;
    unpack(lane.a[0], a[group][pair], a[group][pair + 1]);
    unpack(lane.a[1], a[group + 8][pair], a[group + 8][pair + 1]);
    unpack(lane.a[2], a[group][pair + 8], a[group][pair + 9]);
    unpack(lane.a[3], a[group + 8][pair + 8], a[group + 8][pair + 9]);
    unpack(lane.b[0], b[pair][group], b[pair + 1][group]);
    unpack(lane.b[1], b[pair + 8][group], b[pair + 9][group]);
    d[group][pair] = lane.c[0], d[group][pair + 1] = lane.c[1];
    d[group + 8][pair] = lane.c[2], d[group + 8][pair + 1] = lane.c[3];
  }
  for (int m = 0; m < 16; ++m) {
    for (int k = 0; k < 16; ++k) {
      for (int n = 0; n < 8; ++n) d[m][n] += a[m][k] * b[k][n];
    }
  }
  for (int lane_idx = 0; lane_idx < 32; ++lane_idx) {
    float* lane_d = collective.argument<MmaArgument>(lane_idx).d;
    const int group = lane_idx / 4, pair = lane_idx % 4 * 2;
    lane_d[0] = d[group][pair], lane_d[1] = d[group][pair + 1];
    lane_d[2] = d[group + 8][pair], lane_d[3] = d[group + 8][pair + 1];
  }
  ++collective.counters->mma;
}

}  // namespace

void load_matrices(int num_matrices, bool transposed, const MatrixRow& row, const void* row_address,
                   uint32_t* registers, const Place& place) {
  LdmatrixArgument argument{num_matrices, transposed, &row, row_address, registers};
  whole_warp_collective("ldmatrix", &argument, run_ldmatrix, place);
}

uint32_t movmatrix_transposed(uint32_t source, Place place) {
  MovmatrixArgument argument{source, 0};
  whole_warp_collective("movmatrix", &argument, run_movmatrix, place);
  return argument.result;
}

void mma_m16n8k16(MmaElement element, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                  const float (&c)[4], Place place) {
  MmaArgument argument{a, b, c, d};
  if (element == MmaElement::float16) {
    whole_warp_collective("mma.m16n8k16.f16", &argument, run_mma<widen_float16>, place);
  } else {
    whole_warp_collective("mma.m16n8k16.bf16", &argument, run_mma<widen_bfloat16>, place);
  }
}

}  // namespace pagedkv::emulator
