// The emulator's primitives against what a GPU gave (golden/golden.txt).
#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "golden/golden.h"
#include "test_support.h"

namespace pagedkv::golden {
namespace {

// The recorded words of all sections, [num_words(), LANES].
std::vector<uint32_t> read_record() {
  std::ifstream file(PAGEDKV_GOLDEN_RECORD);
  std::vector<uint32_t> words;
  for (std::string line; std::getline(file, line);) {
    std::istringstream numbers(line.substr(line.find(':') + 1));
    for (std::string number; numbers >> number;) {
      words.push_back(static_cast<uint32_t>(std::strtoul(number.c_str(), nullptr, 16)));
    }
  }
  return words;
}

float float_of(uint32_t bits) { return std::bit_cast<float>(bits); }

template <class T>
bool same_pairs(uint32_t a, uint32_t b) {
  for (const int shift : {0, 16}) {
    const float x = to_float(T{static_cast<uint16_t>(a >> shift)});
    const float y = to_float(T{static_cast<uint16_t>(b >> shift)});
    if (std::isnan(x) ? !std::isnan(y) : std::bit_cast<uint32_t>(x) != std::bit_cast<uint32_t>(y))
      return false;
  }
  return true;
}

bool agrees(Kind kind, uint32_t emulated, uint32_t recorded) {
  const float x = float_of(emulated), y = float_of(recorded);
  switch (kind) {
    case Kind::bits:
      return emulated == recorded;
    case Kind::float32_pair_sums:  // 16 products of numbers below 2 are summed, in an order of the GPU's own
      return std::abs(x - y) <= 64.0f * 0x1p-23f;
    case Kind::float32_exp2:  // subnormal results are flushed to zero
      return std::abs(x - y) <= 0x1p-22f * y + 0x1p-126f;
    case Kind::float16_pairs:
      return same_pairs<float16>(emulated, recorded);
    case Kind::bfloat16_pairs:
      return same_pairs<bfloat16>(emulated, recorded);
  }
  return false;
}

TEST(primitives_agree_with_a_gpu) {
  const std::vector<uint32_t> recorded = read_record(), input = make_input();
  std::vector<uint32_t> emulated(num_words() * LANES);
  if (!CHECK(recorded.size() == emulated.size())) return;
  const Params params{emulated.data(), input.data()};
  CHECK(launch(golden_kernel, dim3(1), dim3(LANES), SHARED_BYTES, nullptr, params) == cudaSuccess);
  const uint32_t* place = emulated.data();
  for (const Section& section : SECTIONS) {
    int num_different = 0;
    for (int i = 0; i < section.words * LANES; ++i, ++place) {
      num_different += !agrees(section.kind, *place, recorded[place - emulated.data()]);
    }
    emulator::testing::report(num_different == 0, __FILE__, __LINE__,
                              std::string(section.name) + ": " + std::to_string(num_different) + " differ");
  }
}

}  // namespace
}  // namespace pagedkv::golden
