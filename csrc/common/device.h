// The one place that knows which compiler is at work. Device code is written against the names below and
// never asks.
//
//   nvcc                        device and host half of a kernel file (.cu)
//   g++ -DPAGEDKV_EMULATED      the same kernel file, run on CPU threads by tests/emulation
//   g++ -DPAGEDKV_WITH_CUDA     host code that calls the launchers (the bindings)
//   g++                         the CPU back-end: PAGEDKV_HD functions only
//
// What a kernel may use beyond plain C++ and CUDA's own words (threadIdx, __syncthreads, __shfl_xor_sync,
// ...):
//
//   PAGEDKV_HD                  a function for host and device
//   PAGEDKV_DEVICE              a function for the device alone; kernels themselves are marked __global__
//   PAGEDKV_SHARED(name)        the CTA's dynamic shared memory as unsigned char*, 128-byte aligned; there is
//   no other load_vector, store_vector   one access of 2, 4, 8 or 16 bytes, whose alignment the emulator
//   checks launch(...)                 the only way to start a kernel
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__CUDACC__)

#if defined(PAGEDKV_EMULATED)
#error "PAGEDKV_EMULATED is for a host compiler: nvcc compiles the real thing"
#endif
#include <cuda_runtime.h>
#define PAGEDKV_HD __host__ __device__ __forceinline__
#define PAGEDKV_DEVICE __device__ __forceinline__
#define PAGEDKV_SHARED(name) extern __shared__ __align__(128) unsigned char name[]

#elif defined(PAGEDKV_EMULATED)

#include "host_cuda.h"
#define PAGEDKV_HD inline
#define PAGEDKV_DEVICE inline
#define PAGEDKV_SHARED(name) unsigned char* const name = ::pagedkv::emulator::shared_memory()

#else

#if defined(PAGEDKV_WITH_CUDA)
#include <cuda_runtime_api.h>
#endif
#define PAGEDKV_HD inline

#endif

#if defined(__CUDACC__) || defined(PAGEDKV_EMULATED)

namespace pagedkv {

template <class Vector>
inline constexpr bool is_vector_v =
    std::is_trivially_copyable_v<Vector> && alignof(Vector) == sizeof(Vector) &&
    (sizeof(Vector) == 2 || sizeof(Vector) == 4 || sizeof(Vector) == 8 || sizeof(Vector) == 16);

#if defined(__CUDACC__)

template <class Vector>
PAGEDKV_DEVICE Vector load_vector(const void* source) {
  static_assert(is_vector_v<Vector>, "a vector is 2, 4, 8 or 16 bytes and aligned to its size");
  return *static_cast<const Vector*>(source);
}

template <class Vector>
PAGEDKV_DEVICE void store_vector(void* destination, Vector value) {
  static_assert(is_vector_v<Vector>, "a vector is 2, 4, 8 or 16 bytes and aligned to its size");
  *static_cast<Vector*>(destination) = value;
}

#else

template <class Vector>
Vector load_vector(const void* source, emulator::Place place = emulator::Place::current()) {
  static_assert(is_vector_v<Vector>, "a vector is 2, 4, 8 or 16 bytes and aligned to its size");
  emulator::check_vector_access("load_vector", emulator::AccessKind::read, source, sizeof(Vector), place);
  Vector value;
  std::memcpy(&value, source, sizeof(Vector));
  return value;
}

template <class Vector>
void store_vector(void* destination, Vector value, emulator::Place place = emulator::Place::current()) {
  static_assert(is_vector_v<Vector>, "a vector is 2, 4, 8 or 16 bytes and aligned to its size");
  emulator::check_vector_access("store_vector", emulator::AccessKind::write, destination, sizeof(Vector),
                                place);
  std::memcpy(destination, &value, sizeof(Vector));
}

#endif

// Starts `kernel`, a __global__ function of one parameter struct, on `grid` CTAs of `cta` threads with
// `shared_bytes` of dynamic shared memory, and returns the error of the launch itself. A grid without CTAs is
// an error, as it is in CUDA. With `early` it may start before the kernel in front of it has ended, whose
// results it must wait for (primitives.h, wait_for_kernel_before), where it was compiled for 9.0 or later.
template <class Params>
cudaError_t launch(void (*kernel)(Params), dim3 grid, dim3 cta, size_t shared_bytes, cudaStream_t stream,
                   const std::type_identity_t<Params>& params, bool early = false) {
  static_assert(std::is_trivially_copyable_v<Params>, "kernel parameters are copied bytewise to the device");
  static_assert(sizeof(Params) <= 4096,
                "the limit of every architecture and CUDA version for kernel parameters");
#if defined(__CUDACC__)
  constexpr size_t DEFAULT_SHARED_LIMIT = 48 * 1024;  // more has to be asked for, kernel by kernel
  if (shared_bytes > DEFAULT_SHARED_LIMIT) {
    const auto attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
    if (cudaFuncSetAttribute(kernel, attribute, static_cast<int>(shared_bytes)) != cudaSuccess) {
      return cudaGetLastError();
    }
  }
  if (early) {
    // What was compiled for less does not wait, also where its PTX has become code for a later device.
    cudaFuncAttributes compiled{};
    if (cudaFuncGetAttributes(&compiled, kernel) != cudaSuccess) return cudaGetLastError();
    early = compiled.ptxVersion >= 90;
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = cta;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, params);
#else
  static_cast<void>(early);
  static_cast<void>(stream);  // the host runs a launch to its end before it returns
  return emulator::run_kernel({grid, cta, shared_bytes}, kernel, params);
#endif
}

}  // namespace pagedkv

#endif
