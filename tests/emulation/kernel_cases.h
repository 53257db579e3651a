// What the tests of the kernels share: random and poisoned buffers of exact size, so that an access past one
// is a report, the schedules that every case runs under, and the comparison with the CPU back-end.
#pragma once

#include <cstdlib>
#include <cstring>
#include <new>
#include <random>
#include <utility>
#include <vector>

#include "common/dispatch.h"
#include "ops.h"
#include "test_support.h"

namespace pagedkv::emulator {

// Buffers begin where those of cudaMalloc do, at a multiple of 256 bytes.
template <class T>
struct DeviceAllocator {
  using value_type = T;
  static constexpr std::align_val_t ALIGNMENT{256};
  T* allocate(size_t num_elements) {
    return static_cast<T*>(::operator new(num_elements * sizeof(T), ALIGNMENT));
  }
  void deallocate(T* buffer, size_t /*num_elements*/) { ::operator delete(buffer, ALIGNMENT); }
  bool operator==(const DeviceAllocator&) const = default;
};

using Bytes = std::vector<unsigned char, DeviceAllocator<unsigned char>>;

inline constexpr DType FLOAT_DTYPES[] = {DType::float16, DType::bfloat16, DType::float32};
inline constexpr DType QUANTISED_DTYPES[] = {DType::float8_e4m3fn, DType::float8_e5m2, DType::int8};

// The legal pairs of an input and a cache dtype.
inline std::vector<std::pair<DType, DType>> dtype_pairs() {
  std::vector<std::pair<DType, DType>> pairs;
  for (const DType input : FLOAT_DTYPES) {
    pairs.emplace_back(input, input);
    for (const DType cache : QUANTISED_DTYPES) pairs.emplace_back(input, cache);
  }
  return pairs;
}

inline int64_t bytes_of(DType dtype) {
  int64_t num_bytes = 0;
  dispatch_dtype(dtype, [&]<class T>() { num_bytes = sizeof(T); });
  return num_bytes;
}

// 0xff everywhere: NaN, or -1 in an int8 buffer.
inline Bytes poison(DType dtype, int64_t num_elements) {
  return Bytes(static_cast<size_t>(num_elements * bytes_of(dtype)), 0xff);
}

inline std::mt19937 random_bits(1);

inline void fill_randomly(unsigned char* elements, DType dtype, int64_t num_elements) {
  std::normal_distribution<float> normal;
  dispatch_dtype(dtype, [&]<class T>() {
    for (int64_t idx = 0; idx < num_elements; ++idx) {
      const T element = from_float<T>(4 * normal(random_bits));
      std::memcpy(elements + idx * static_cast<int64_t>(sizeof(T)), &element, sizeof(T));
    }
  });
}

inline Bytes random_elements(DType dtype, int64_t num_elements) {
  Bytes result = poison(dtype, num_elements);
  fill_randomly(result.data(), dtype, num_elements);
  return result;
}

inline float element_at(const Bytes& bytes, DType dtype, int64_t idx) {
  float value = 0.0f;
  dispatch_dtype(dtype, [&]<class T>() {
    T element;
    std::memcpy(&element, bytes.data() + idx * static_cast<int64_t>(sizeof(T)), sizeof(T));
    value = to_float(element);
  });
  return value;
}

// Ascending, descending, and as many random ones as the environment's PAGEDKV_TEST_SEEDS says.
inline std::vector<Options> schedules() {
  const char* num_seeds = std::getenv("PAGEDKV_TEST_SEEDS");
  std::vector<Options> result = {Options{}, Options{.schedule = Schedule::descending}};
  for (int seed = 1; seed <= (num_seeds != nullptr ? std::atoi(num_seeds) : 2); ++seed) {
    result.push_back({.schedule = Schedule::random, .seed = static_cast<uint64_t>(seed)});
  }
  return result;
}

// Runs `run(emulated, outputs)` once on the CPU back-end and once per schedule on the emulator, each on a
// fresh copy of `outputs`, and compares what they leave there.
template <class Run>
void check_same_bytes(const std::vector<Bytes>& outputs, Run run) {
  std::vector<Bytes> expected = outputs;
  run(false, expected);
  for (const Options& options : schedules()) {
    set_options(options);
    std::vector<Bytes> actual = outputs;
    const cudaError_t error = run(true, actual);
    testing::report(error == cudaSuccess, __FILE__, __LINE__, cudaGetErrorString(error));
    CHECK(actual == expected);
  }
}

}  // namespace pagedkv::emulator
