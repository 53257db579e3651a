// The part of the CUDA runtime that launchers call, on host memory. Every stream is synchronous: a call has
// done its work when it returns.
#pragma once

#include <cstddef>
#include <string>

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorLaunchFailure = 719,
};

enum cudaMemcpyKind {
  cudaMemcpyHostToHost = 0,
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3,
  cudaMemcpyDefault = 4,
};

using cudaStream_t = struct EmulatedStream*;  // never created: the null stream is the only one

// The name of an error; for the most recent error of this OS thread, the full account of what happened.
const char* cudaGetErrorString(cudaError_t error);

// The last error of this OS thread that no call has returned yet, which it then forgets.
cudaError_t cudaGetLastError();

cudaError_t cudaMemcpyAsync(void* destination, const void* source, size_t num_bytes, cudaMemcpyKind kind,
                            cudaStream_t stream = nullptr);
cudaError_t cudaMemcpy2DAsync(void* destination, size_t destination_pitch, const void* source,
                              size_t source_pitch, size_t width, size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream = nullptr);
cudaError_t cudaMemsetAsync(void* destination, int value, size_t num_bytes, cudaStream_t stream = nullptr);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);

enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

// Few multiprocessors, so that small shapes are already cut as large ones are on a device.
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr /*attribute*/, int /*device*/) {
  *value = 8;
  return cudaSuccess;
}

namespace pagedkv::emulator {

// Remembers `text` as the account of `error` and returns `error`. The error counts as returned to the caller,
// so cudaGetLastError does not report it again.
cudaError_t report_error(cudaError_t error, std::string text);

}  // namespace pagedkv::emulator
