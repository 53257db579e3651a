// Which instruction set the attention kernels use: the best that this processor has, found when the library
// is loaded, or the one that PAGEDKV_CPU_ISA names.
#pragma once

#include <string>

#include "cpu/paged_attention/task.h"
#include "params.h"

namespace pagedkv::cpu {

enum class Isa { portable, avx2, avx512, avx512_bf16 };

// The choice; std::invalid_argument where PAGEDKV_CPU_ISA names none, or one that this processor lacks.
Isa chosen_isa();

// The names of those that this processor has, worst first, separated by ", ".
std::string supported_isas();
const char* isa_name(Isa isa);

#if defined(__x86_64__) && !defined(PAGEDKV_PORTABLE_ONLY)
#define PAGEDKV_X86_KERNELS
extern const AttentionKernels AVX2_KERNELS, AVX512_KERNELS, AVX512_BF16_KERNELS;
#endif

// The kernels of a set for queries of this dtype; null for the portable one.
const AttentionKernels* attention_kernels(Isa isa, DType query_dtype);

void portable_paged_attention(const PagedAttentionParams& p);

}  // namespace pagedkv::cpu
