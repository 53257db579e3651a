#include "cpu/paged_attention/isa.h"

#include <cstdlib>
#include <stdexcept>

namespace pagedkv::cpu {

namespace {

constexpr Isa ALL_ISAS[] = {Isa::portable, Isa::avx2, Isa::avx512, Isa::avx512_bf16};

bool is_supported(Isa isa) {
  if (isa == Isa::portable) return true;
#if defined(PAGEDKV_X86_KERNELS)
  // Every processor with FMA has F16C too, for which clang has no name here.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (isa == Isa::avx2) return avx2;
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (isa == Isa::avx512) return avx512;
  return avx512 && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

Isa choose() {
  const char* wanted = std::getenv("PAGEDKV_CPU_ISA");
  Isa best = Isa::portable;
  for (const Isa isa : ALL_ISAS) {
    if (!is_supported(isa)) continue;
    if (wanted != nullptr && std::string(wanted) == isa_name(isa)) return isa;
    best = isa;
  }
  if (wanted != nullptr && *wanted != '\0') {
    throw std::invalid_argument("PAGEDKV_CPU_ISA is \"" + std::string(wanted) +
                                "\"; supported on this processor: " + supported_isas());
  }
  return best;
}

}  // namespace

Isa chosen_isa() {
  static const Isa isa = choose();
  return isa;
}

std::string supported_isas() {
  std::string names;
  for (const Isa isa : ALL_ISAS) {
    if (is_supported(isa)) names += (names.empty() ? "" : ", ") + std::string(isa_name(isa));
  }
  return names;
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::avx2:
      return "avx2";
    case Isa::avx512:
      return "avx512";
    case Isa::avx512_bf16:
      return "avx512_bf16";
    default:
      return "portable";
  }
}

const AttentionKernels* attention_kernels(Isa isa, [[maybe_unused]] DType query_dtype) {
#if defined(PAGEDKV_X86_KERNELS)
  if (isa == Isa::avx2) return &AVX2_KERNELS;
  if (isa == Isa::avx512_bf16 && query_dtype == DType::bfloat16) return &AVX512_BF16_KERNELS;
  if (isa != Isa::portable) return &AVX512_KERNELS;
#endif
  return nullptr;
}

}  // namespace pagedkv::cpu
