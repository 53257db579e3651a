// The twins of the instructions that kernels use on some architectures only, and the widening of 8-bit
// caches.
#include <cmath>

#include "cuda/paged_attention/widen.h"
#include "test_support.h"

namespace pagedkv::emulator {
namespace {

using cuda::Pairing;

template <class Half>
float half_of(uint32_t pair, int idx) {
  return to_float(Half{static_cast<uint16_t>(pair >> 16 * idx)});
}

bool is_same(float a, float b) {
  return std::isnan(a) ? std::isnan(b) : a == b && std::signbit(a) == std::signbit(b);
}

float value_of(uint8_t code, DType dtype) {
  if (dtype == DType::int8) return to_float(static_cast<int8_t>(code));
  return dtype == DType::float8_e4m3fn ? to_float(float8_e4m3fn{code}) : to_float(float8_e5m2{code});
}

// Every code in every byte, beside others, comes out exactly and in its place.
template <bool IS_INT8, Pairing PAIRING>
void check_widener(DType dtype) {
  const cuda::Widener widener(dtype);
  CHECK(widener.is_int8() == IS_INT8);
  bool right = true;
  for (uint32_t code = 0; code < 256; code += 4) {
    uint32_t packed[4], low[4], high[4];
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t x = code + i;
      packed[i] = x | (x ^ 0x55) << 8 | (255 - x) << 16 | (x * 7 & 0xff) << 24;
    }
    widener.widen<IS_INT8, PAIRING>(packed, low, high);
    for (int i = 0; i < 16; ++i) {
      const int byte = i % 4;
      const bool is_high = PAIRING == Pairing::neighbours ? byte / 2 : byte % 2;
      const int place = PAIRING == Pairing::neighbours ? byte % 2 : byte / 2;
      right &= is_same(half_of<float16>(is_high ? high[i / 4] : low[i / 4], place),
                       value_of(static_cast<uint8_t>(packed[i / 4] >> 8 * byte), dtype));
    }
  }
  CHECK(right);
}

TEST(widener_is_exact) {
  check_widener<true, Pairing::neighbours>(DType::int8);
  check_widener<true, Pairing::transposed>(DType::int8);
  for (const DType dtype : {DType::float8_e4m3fn, DType::float8_e5m2}) {
    check_widener<false, Pairing::neighbours>(dtype);
    check_widener<false, Pairing::transposed>(dtype);
  }
}

TEST(convert_e4m3_pair_is_exact) {
  bool right = true;
  for (int code = 0; code < 256; ++code) {
    const uint32_t pair = cuda::convert_e4m3_pair(static_cast<uint16_t>(code | (255 - code) << 8));
    right &= is_same(half_of<float16>(pair, 0), to_float(float8_e4m3fn{static_cast<uint8_t>(code)}));
    right &= is_same(half_of<float16>(pair, 1), to_float(float8_e4m3fn{static_cast<uint8_t>(255 - code)}));
  }
  CHECK(right);
}

TEST(byte_permute_takes_bytes_of_both_registers) {
  CHECK(cuda::byte_permute(0x33221100u, 0x77665544u, 0x7140) == 0x77114400u);
  CHECK(cuda::byte_permute(0x33221100u, 0x77665544u, 0x3210) == 0x33221100u);
}

TEST(fma_float16_pairs_rounds_once) {
  // 1 + 2 ** -9 squared is 1 + 2 ** -8 + 2 ** -18: the last term is lost unless the 1 is taken off first.
  const uint32_t x = 0x3c023c02u, minus_one = 0xbc00bc00u;
  CHECK(half_of<float16>(cuda::fma_float16_pairs(x, x, minus_one), 0) == 0x1p-8f + 0x1p-18f);
}

}  // namespace
}  // namespace pagedkv::emulator
