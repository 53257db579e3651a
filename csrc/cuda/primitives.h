// One named function per PTX instruction that the attention kernels use, each with its twin on the emulator.
// PTX ISA 8.0, sections "Data Movement and Conversion Instructions: Asynchronous copy" and "Warp Level Matrix
// Instructions".
#pragma once

#include "common/device.h"
#include "common/dtypes.h"

namespace pagedkv::cuda {

inline constexpr unsigned FULL_WARP = 0xffffffffu;

// Whether convert_e4m3_pair may be called.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
inline constexpr bool HAS_FLOAT8_CONVERSION = true;
#else
inline constexpr bool HAS_FLOAT8_CONVERSION = false;
#endif

// A kernel that is launched early calls wait_for_kernel_before() before it touches what that one wrote; the
// other lets it start with let_kernel_behind_start() (PTX ISA, griddepcontrol). One that was not waits
// anyway.
PAGEDKV_DEVICE void wait_for_kernel_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
PAGEDKV_DEVICE void let_kernel_behind_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#if defined(PAGEDKV_EMULATED)

// 16 bytes from global to shared memory, behind the thread's back; with read = false the destination becomes
// zero.
inline void cp_async_16(void* destination, const void* source, bool read) {
  emulator::async_copy<16>(destination, source, read ? 16 : 0);
}
inline void cp_async_commit() { emulator::async_copy_commit(); }
template <int NUM_PENDING>
void cp_async_wait() {
  emulator::async_copy_wait(NUM_PENDING);
}

// Four 8x8 matrices of 16-bit elements; lane 8 j + i gives the address of row i of matrix j.
inline void ldmatrix_x4(uint32_t (&registers)[4], const void* row) {
  emulator::ldmatrix<4, false>(registers, row);
}
inline void ldmatrix_x4_trans(uint32_t (&registers)[4], const void* row) {
  emulator::ldmatrix<4, true>(registers, row);
}

// Transposes an 8x8 matrix of 16-bit elements that the warp holds, one register a lane.
inline uint32_t movmatrix_trans(uint32_t source) { return emulator::movmatrix_transposed(source); }

// d += a b: [16, 16] by [16, 8], float32 accumulation.
template <class T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  constexpr bool IS_BFLOAT16 = std::is_same_v<T, bfloat16>;
  emulator::mma_m16n8k16(IS_BFLOAT16 ? emulator::MmaElement::bfloat16 : emulator::MmaElement::float16, d, a,
                         b, d);
}

// 2 ** x to about 2 ulp; 2 ** -inf is 0.
inline float exp2_approx(float x) { return exp2f(x); }

// Byte i of the result is byte selector >> 4 i & 7 of the eight bytes x, y, lowest first.
inline uint32_t byte_permute(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t bytes = x | static_cast<uint64_t>(y) << 32;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<uint32_t>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  }
  return result;
}

// a * b + c of the two float16 in each register, rounded once.
inline uint32_t fma_float16_pairs(uint32_t a, uint32_t b, uint32_t c) {
  const auto half = [&](int shift) {
    const auto at = [&](uint32_t pair) {
      return double{to_float(float16{static_cast<uint16_t>(pair >> shift)})};
    };
    return static_cast<uint32_t>(from_float<float16>(static_cast<float>(at(a) * at(b) + at(c))).bits)
           << shift;
  };
  return half(0) | half(16);
}

// Two float8_e4m3fn as two float16.
inline uint32_t convert_e4m3_pair(uint16_t pair) {
  const auto half = [&](int shift) {
    const float value = to_float(float8_e4m3fn{static_cast<uint8_t>(pair >> shift)});
    return static_cast<uint32_t>(from_float<float16>(value).bits) << 2 * shift;
  };
  return half(0) | half(8);
}

#else

PAGEDKV_DEVICE unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

PAGEDKV_DEVICE void cp_async_16(void* destination, const void* source, bool read) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(destination)),
               "l"(source), "r"(read ? 16 : 0)
               : "memory");
}
PAGEDKV_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int NUM_PENDING>
PAGEDKV_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(NUM_PENDING) : "memory");
}

PAGEDKV_DEVICE void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
PAGEDKV_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
PAGEDKV_DEVICE uint32_t movmatrix_trans(uint32_t source) {
  uint32_t transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(source));
  return transposed;
}

template <class T>
PAGEDKV_DEVICE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

PAGEDKV_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

PAGEDKV_DEVICE uint32_t byte_permute(uint32_t x, uint32_t y, uint32_t selector) {
  return __byte_perm(x, y, selector);
}

PAGEDKV_DEVICE uint32_t fma_float16_pairs(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

PAGEDKV_DEVICE uint32_t convert_e4m3_pair(uint16_t pair) {
  uint32_t converted = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(converted) : "h"(pair));
#endif
  return converted;
}

#endif

// Two floats as the halves of a register, low first, rounded to nearest even.
template <class T>
PAGEDKV_DEVICE uint32_t pack2(float low, float high) {
#if defined(__CUDA_ARCH__)
  uint32_t packed;
  if constexpr (std::is_same_v<T, bfloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
#else
  return from_float<T>(low).bits | static_cast<uint32_t>(from_float<T>(high).bits) << 16;
#endif
}

}  // namespace pagedkv::cuda
