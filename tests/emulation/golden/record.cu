// Prints golden.txt, on a GPU that has every instruction (sm_89 and later):
//   nvcc -std=c++20 -fmad=false --expt-relaxed-constexpr -arch=native -I csrc
//   tests/emulation/golden/record.cu -o record && ./record
#include <cstdio>

#include "golden.h"

using namespace pagedkv::golden;

int main() {
  const std::vector<uint32_t> input = make_input();
  std::vector<uint32_t> out(num_words() * LANES);
  Params params{};
  uint32_t* device_input = nullptr;
  cudaMalloc(&params.out, out.size() * 4);
  cudaMalloc(&device_input, input.size() * 4);
  cudaMemcpy(device_input, input.data(), input.size() * 4, cudaMemcpyHostToDevice);
  params.input = device_input;
  pagedkv::launch(golden_kernel, dim3(1), dim3(LANES), SHARED_BYTES, nullptr, params);
  cudaMemcpy(out.data(), params.out, out.size() * 4, cudaMemcpyDeviceToHost);
  const cudaError_t error = cudaDeviceSynchronize();
  if (error != cudaSuccess) {
    std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
    return 1;
  }
  int word = 0;
  for (const Section& section : SECTIONS) {
    for (int i = 0; i < section.words; ++i, ++word) {
      std::printf("%s %d:", section.name, i);
      for (int lane = 0; lane < LANES; ++lane) std::printf(" %08x", out[word * LANES + lane]);
      std::printf("\n");
    }
  }
}
