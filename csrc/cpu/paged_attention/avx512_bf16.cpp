// The kernels for AVX-512 with dot products of bfloat16: those of AVX-512 but for bfloat16 queries.
#if defined(__x86_64__)

#include "cpu/paged_attention/target_headers.h"

#if defined(__clang__)
#pragma clang attribute push(                                                                          \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,avx2,fma,f16c"))), \
    apply_to = function)
#else
// Of intrinsics that leave a register undefined.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,avx2,fma,f16c")
#endif

#include "cpu/paged_attention/kernels.h"
#include "cpu/paged_attention/pair_math.h"

namespace pagedkv::cpu {

namespace {

struct PairMathOf {
  template <class Body>
  static void dispatch(const PagedAttentionParams& p, Body&& body) {
    dispatch_dtype(p.cache_dtype, [&]<class Cache>() {
      if constexpr (is_quantised_v<Cache> || std::is_same_v<Cache, bfloat16>) {
        body.template operator()<PairMath<Cache>>();
      } else {
        unsupported_dtype("a cache of a bfloat16 query", p.cache_dtype, "bfloat16 and the 8-bit dtypes");
      }
    });
  }
};

}  // namespace

extern const AttentionKernels AVX512_BF16_KERNELS = KernelTable<Avx512Bf16, PairMathOf>::KERNELS;

}  // namespace pagedkv::cpu

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
