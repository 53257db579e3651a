#include "host_runtime.h"

#include <cstring>
#include <utility>

namespace {

thread_local cudaError_t reported_error = cudaSuccess;
thread_local std::string reported_text;
thread_local cudaError_t pending_error = cudaSuccess;

cudaError_t fail_call(std::string text) {
  pending_error = cudaErrorInvalidValue;
  return pagedkv::emulator::report_error(cudaErrorInvalidValue, std::move(text));
}

}  // namespace

namespace pagedkv::emulator {

cudaError_t report_error(cudaError_t error, std::string text) {
  reported_error = error;
  reported_text = std::move(text);
  return error;
}

}  // namespace pagedkv::emulator

const char* cudaGetErrorString(cudaError_t error) {
  if (error != cudaSuccess && error == reported_error) return reported_text.c_str();
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorLaunchFailure:
      return "unspecified launch failure";
  }
  return "unrecognized error code";
}

cudaError_t cudaGetLastError() { return std::exchange(pending_error, cudaSuccess); }

cudaError_t cudaMemcpyAsync(void* destination, const void* source, size_t num_bytes, cudaMemcpyKind,
                            cudaStream_t) {
  if (num_bytes == 0) return cudaSuccess;
  if (destination == nullptr || source == nullptr) return fail_call("cudaMemcpyAsync: null pointer");
  std::memmove(destination, source, num_bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void* destination, size_t destination_pitch, const void* source,
                              size_t source_pitch, size_t width, size_t height, cudaMemcpyKind,
                              cudaStream_t) {
  if (width == 0 || height == 0) return cudaSuccess;
  if (destination == nullptr || source == nullptr) return fail_call("cudaMemcpy2DAsync: null pointer");
  if (width > destination_pitch || width > source_pitch) {
    return fail_call("cudaMemcpy2DAsync: width " + std::to_string(width) + " exceeds a pitch (destination " +
                     std::to_string(destination_pitch) + ", source " + std::to_string(source_pitch) + ")");
  }
  for (size_t row_idx = 0; row_idx < height; ++row_idx) {
    std::memmove(static_cast<char*>(destination) + row_idx * destination_pitch,
                 static_cast<const char*>(source) + row_idx * source_pitch, width);
  }
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* destination, int value, size_t num_bytes, cudaStream_t) {
  if (num_bytes == 0) return cudaSuccess;
  if (destination == nullptr) return fail_call("cudaMemsetAsync: null pointer");
  std::memset(destination, value, num_bytes);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
