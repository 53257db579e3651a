// Argument checks that read like a signature, and the one place where an operator chooses its back-end. With
// the other files of this folder the only code that sees torch.
//
// A wrong dtype is a TypeError, an index that the host can see a wrong value of an IndexError, everything
// else a ValueError. Each message names the argument, what it was and what is supported.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <initializer_list>
#include <optional>
#include <string>

#include "ops.h"

#if defined(PAGEDKV_WITH_CUDA)
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

#ifndef PAGEDKV_NAMESPACE
#define PAGEDKV_NAMESPACE pagedkv
#endif

namespace pagedkv::bindings {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

DType dtype_of(const Tensor& tensor, const char* name);  // TypeError outside the contract's dtypes
bool is_quantised(DType dtype);

void check_dtype(const Tensor& tensor, const char* name, at::ScalarType expected);
void check_float_dtype(const Tensor& tensor, const char* name);  // float16, bfloat16, float32
void check_same_dtype(const Tensor& tensor, const char* name, const Tensor& other, const char* other_name);
void check_device(const Tensor& tensor, const char* name, const Tensor& other, const char* other_name);

// The number of dimensions, as a pattern such as "[num_tokens, num_heads, head_dim]", and a contiguous last
// one.
void check_layout(const Tensor& tensor, const char* name, const char* pattern);
void check_size(const Tensor& tensor, const char* name, int64_t dim, int64_t expected, const char* what);

// All of the above for a small tensor that goes with `other`: e.g. sinks, float32, [num_heads].
void check_vector(const Tensor& tensor, const char* name, at::ScalarType dtype, int64_t size,
                  const char* pattern, const Tensor& other, const char* other_name);

// key_cache and value_cache: dtypes, device, layout and agreement with each other.
void check_caches(const Tensor& key_cache, const Tensor& value_cache);

// A scale is a float, or float32 [num_kv_heads]; int8 caches need both, float caches take none.
void check_scales(const Tensor& cache, const OptionalTensor& k_scale, std::optional<double> k_scale_value,
                  const OptionalTensor& v_scale, std::optional<double> v_scale_value);

// head_dim of an attention operand: a multiple of 8 from 8 to 256.
void check_attention_head_dim(int64_t head_dim, const char* name);

// True where indices are on the host, or set_debug asked for them to be brought there.
bool indices_are_checked(const Tensor& indices);
void set_debug(bool on);

// True where the CUDA side of an operator runs on the tensor: on CUDA tensors, and on all in the emulated
// library.
bool runs_on_device(const Tensor& tensor);

// block_tables and context_lens (and kv_starts) that agree with each other and with the caches.
void check_tables(const Tensor& block_tables, const Tensor& context_lens, const OptionalTensor& kv_starts,
                  const Tensor& cache);

// Keys are counted in int32 and in whole tiles, so some room must be left behind the last one.
inline constexpr int64_t MAX_CONTEXT_LEN = (int64_t{1} << 31) - 256;

// IndexError for a context longer than its table, and for a needed entry outside the pool. The keys that
// sequence s needs are [first_key(s), context_lens[s]).
template <class FirstKey>
void check_needed_blocks(const Tensor& block_tables, const Tensor& context_lens, int64_t block_size,
                         int64_t num_blocks, FirstKey&& first_key) {
  const Tensor tables = block_tables.cpu(), lens = context_lens.cpu();
  const auto* table = tables.const_data_ptr<int32_t>();
  const auto* context_len = lens.const_data_ptr<int32_t>();
  const int64_t capacity = tables.size(1) * block_size;
  for (int64_t seq_idx = 0; seq_idx < lens.size(0); ++seq_idx) {
    const int64_t len = context_len[seq_idx];
    TORCH_CHECK_INDEX(len >= 0, "context_lens[", seq_idx, "] is ", len, "; it must not be negative");
    TORCH_CHECK_INDEX(len <= capacity, "context_lens[", seq_idx, "] is ", len,
                      ", but block_tables has room for ", tables.size(1), " blocks of ", block_size,
                      " tokens, that is ", capacity);
    TORCH_CHECK_INDEX(len <= MAX_CONTEXT_LEN, "context_lens[", seq_idx, "] is ", len, "; at most ",
                      MAX_CONTEXT_LEN, " are supported");
    const int64_t begin = std::max<int64_t>(0, first_key(seq_idx));
    for (int64_t entry = begin / block_size; entry * block_size < len && begin < len; ++entry) {
      const int64_t block = table[seq_idx * tables.stride(0) + entry];
      TORCH_CHECK_INDEX(block >= 0 && block < num_blocks, "block_tables[", seq_idx, ", ", entry, "] is ",
                        block, ", outside the pool of ", num_blocks, " blocks (sequence ", seq_idx,
                        " needs it for its ", len, " tokens)");
    }
  }
}

// IndexError for a slot past the cache's last one.
void check_slots(const Tensor& slot_mapping, int64_t num_slots);

// A pointer that may be missing.
template <class T>
const T* data_or_null(const OptionalTensor& tensor) {
  return tensor.has_value() ? tensor->const_data_ptr<T>() : nullptr;
}

// In grad mode an input that requires grad is a RuntimeError; registered for every operator at the Autograd
// key.
void inference_only(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// Runs the back-end of `device`. `cuda` is null in a build without it, where no CUDA key is registered.
#if defined(PAGEDKV_EMULATED)

// The emulated library runs the CUDA side on CPU tensors.
#define PAGEDKV_RUN(op, device, params) \
  (static_cast<void>(device), ::pagedkv::bindings::check_cuda(#op, ::pagedkv::cuda::op(params, nullptr)))
void check_cuda(const char* op, cudaError_t error);

#elif defined(PAGEDKV_WITH_CUDA)

void check_cuda(const char* op, cudaError_t error);

template <class Params>
void run(const char* op, at::Device device, void (*cpu)(const Params&),
         cudaError_t (*cuda)(const Params&, cudaStream_t), const Params& params) {
  if (device.is_cpu()) return cpu(params);
  const c10::cuda::CUDAGuard guard(device);
  check_cuda(op, cuda(params, c10::cuda::getCurrentCUDAStream().stream()));
}
#define PAGEDKV_RUN(op, device, params) \
  ::pagedkv::bindings::run(#op, device, &::pagedkv::cpu::op, &::pagedkv::cuda::op, params)

// What the current stream of `waiting` does next comes after what that of `other` has been given.
inline void let_stream_wait(at::Device waiting, at::Device other) {
  if (!waiting.is_cuda() || !other.is_cuda() || waiting == other) return;
  const c10::cuda::CUDAGuard guard(other);
  cudaEvent_t event = nullptr;
  check_cuda("swap_blocks", cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  cudaError_t error = cudaEventRecord(event, c10::cuda::getCurrentCUDAStream(other.index()));
  if (error == cudaSuccess) {
    error = cudaStreamWaitEvent(c10::cuda::getCurrentCUDAStream(waiting.index()), event, 0);
  }
  cudaEventDestroy(event);  // once it has happened
  check_cuda("swap_blocks", error);
}

#else

#define PAGEDKV_RUN(op, device, params) (static_cast<void>(device), ::pagedkv::cpu::op(params))

#endif

#if !defined(PAGEDKV_WITH_CUDA)
inline void let_stream_wait(at::Device /*waiting*/, at::Device /*other*/) {}
#endif

#if defined(PAGEDKV_WITH_CUDA)
#define PAGEDKV_CUDA_KEY(name) \
  TORCH_LIBRARY_IMPL(PAGEDKV_NAMESPACE, CUDA, m) { m.impl(#name, &::pagedkv::bindings::name); }
#else
#define PAGEDKV_CUDA_KEY(name)
#endif

// The last block of a binding file: its schema, and the function for every back-end that this library has.
#define PAGEDKV_OP(name, schema)                                                                      \
  TORCH_LIBRARY_FRAGMENT(PAGEDKV_NAMESPACE, m) { m.def(#name schema, {at::Tag::pt2_compliant_tag}); } \
  TORCH_LIBRARY_IMPL(PAGEDKV_NAMESPACE, Autograd, m) {                                                \
    m.impl(#name, torch::CppFunction::makeFromBoxedFunction<&::pagedkv::bindings::inference_only>()); \
  }                                                                                                   \
  TORCH_LIBRARY_IMPL(PAGEDKV_NAMESPACE, CPU, m) { m.impl(#name, &::pagedkv::bindings::name); }        \
  PAGEDKV_CUDA_KEY(name)

}  // namespace pagedkv::bindings
