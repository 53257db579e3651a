// The kernels for AVX2, FMA, F16C.
#if defined(__x86_64__)

#include "cpu/paged_attention/target_headers.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
// Of intrinsics that leave a register undefined.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx2,fma,f16c")
#endif

#include "cpu/paged_attention/float_math.h"
#include "cpu/paged_attention/kernels.h"
#include "cpu/paged_attention/vector_avx2.h"

namespace pagedkv::cpu {

extern const AttentionKernels AVX2_KERNELS = KernelTable<Avx2, FloatMathOf<Avx2>>::KERNELS;

}  // namespace pagedkv::cpu

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
