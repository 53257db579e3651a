// The kernels for AVX-512 F, BW, DQ, VL.
#if defined(__x86_64__)

#include "cpu/paged_attention/target_headers.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
                             apply_to = function)
#else
// Of intrinsics that leave a register undefined.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

#include "cpu/paged_attention/float_math.h"
#include "cpu/paged_attention/kernels.h"
#include "cpu/paged_attention/vector_avx512.h"

namespace pagedkv::cpu {

extern const AttentionKernels AVX512_KERNELS = KernelTable<Avx512, FloatMathOf<Avx512>>::KERNELS;

}  // namespace pagedkv::cpu

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
