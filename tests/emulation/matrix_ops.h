// The tensor-core instructions of a warp on raw 32-bit registers, two 16-bit elements in each, the lower half
// first. Layouts: PTX ISA, "Warp Level Matrix Instructions". With group = lane / 4 and pair = lane % 4 * 2:
//
//   8x8 matrix (ldmatrix, movmatrix)   register holds row `group`, columns pair, pair + 1
//   mma A [16 m, 16 k]                 a0 (group, pair..)   a1 (group + 8, pair..)
//                                      a2 (group, pair + 8..)   a3 (group + 8, pair + 8..)
//   mma B [16 k, 8 n]                  b0 (rows pair, pair + 1; column group)   b1 (rows pair + 8, pair + 9)
//   mma C, D [16 m, 8 n] float32       d0, d1 (group, pair and pair + 1)   d2, d3 (group + 8, the same)
#pragma once

#include <cstdint>
#include <cstring>

#include "emulator.h"

namespace pagedkv::emulator {

struct MatrixRow {
  uint16_t elements[8];
};

// `row` is what this lane's address gave, read by the caller: lane 8 j + i brings row i of matrix j. Fills
// registers[j] with this lane's part of matrix j.
void load_matrices(int num_matrices, bool transposed, const MatrixRow& row, const void* row_address,
                   uint32_t* registers, const Place& place);

// ldmatrix.sync.aligned.m8n8.x{1,2,4}[.trans].shared.b16. Lanes from 8 * NUM_MATRICES give an address that is
// not used.
template <int NUM_MATRICES, bool TRANSPOSED>
void ldmatrix(uint32_t (&registers)[NUM_MATRICES], const void* row_address, Place place = Place::current()) {
  static_assert(NUM_MATRICES == 1 || NUM_MATRICES == 2 || NUM_MATRICES == 4,
                "ldmatrix loads 1, 2 or 4 matrices");
  MatrixRow row{};
  if (current_thread->lane_idx < 8 * NUM_MATRICES) {
    check_shared_access("ldmatrix", row_address, sizeof(row), place);
    trace_access(AccessKind::read, row_address, sizeof(row), place);
    std::memcpy(&row, row_address, sizeof(row));  // here, where the sanitizers see each lane read its own row
  }
  load_matrices(NUM_MATRICES, TRANSPOSED, row, row_address, registers, place);
}

// movmatrix.sync.aligned.m8n8.trans.b16: this lane's part of the transposed 8x8 matrix.
uint32_t movmatrix_transposed(uint32_t source, Place place = Place::current());

enum class MmaElement { float16, bfloat16 };

// mma.sync.aligned.m16n8k16.row.col.f32.{f16,bf16}.{f16,bf16}.f32: d = a b + c. Products are exact; sums are
// float32 in the order of k, where a device adds in an order and with a rounding of its own. d may be c.
void mma_m16n8k16(MmaElement element, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                  const float (&c)[4], Place place = Place::current());

}  // namespace pagedkv::emulator
