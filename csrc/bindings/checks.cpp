#include "bindings/checks.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>

namespace pagedkv::bindings {

namespace {

constexpr const char* SUPPORTED_DTYPES = "float16, bfloat16, float32, float8_e4m3fn, float8_e5m2, int8";

std::atomic<bool> debug_mode{false};

}  // namespace

DType dtype_of(const Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case at::kHalf:
      return DType::float16;
    case at::kBFloat16:
      return DType::bfloat16;
    case at::kFloat:
      return DType::float32;
    case at::kFloat8_e4m3fn:
      return DType::float8_e4m3fn;
    case at::kFloat8_e5m2:
      return DType::float8_e5m2;
    case at::kChar:
      return DType::int8;
    default:
      TORCH_CHECK_TYPE(false, name, " has dtype ", tensor.scalar_type(), "; supported: ", SUPPORTED_DTYPES);
  }
}

bool is_quantised(DType dtype) {
  return dtype == DType::float8_e4m3fn || dtype == DType::float8_e5m2 || dtype == DType::int8;
}

void check_dtype(const Tensor& tensor, const char* name, at::ScalarType expected) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == expected, name, " has dtype ", tensor.scalar_type(),
                   "; it must be ", expected);
}

void check_float_dtype(const Tensor& tensor, const char* name) {
  const at::ScalarType dtype = tensor.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat, name, " has dtype ",
                   dtype, "; supported: float16, bfloat16, float32");
}

void check_same_dtype(const Tensor& tensor, const char* name, const Tensor& other, const char* other_name) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == other.scalar_type(), name, " has dtype ", tensor.scalar_type(),
                   ", but ", other_name, " has ", other.scalar_type(), "; they must agree");
}

void check_device(const Tensor& tensor, const char* name, const Tensor& other, const char* other_name) {
  TORCH_CHECK_VALUE(tensor.device() == other.device(), name, " is on ", tensor.device(), ", but ", other_name,
                    " is on ", other.device(), "; they must be on the same device");
}

void check_layout(const Tensor& tensor, const char* name, const char* pattern) {
  const auto dims = std::count(pattern, pattern + std::strlen(pattern), ',') + 1;
  TORCH_CHECK_VALUE(tensor.dim() == dims, name, " must be ", pattern, ", got the shape ", tensor.sizes());
  const int64_t last = tensor.dim() - 1;
  TORCH_CHECK_VALUE(tensor.size(last) <= 1 || tensor.stride(last) == 1, name,
                    " must have a contiguous last dimension (stride 1), got the strides ", tensor.strides());
}

void check_size(const Tensor& tensor, const char* name, int64_t dim, int64_t expected, const char* what) {
  TORCH_CHECK_VALUE(tensor.size(dim) == expected, name, " has the shape ", tensor.sizes(), "; its dimension ",
                    dim, " must be ", what, ", that is ", expected);
}

void check_vector(const Tensor& tensor, const char* name, at::ScalarType dtype, int64_t size,
                  const char* pattern, const Tensor& other, const char* other_name) {
  check_dtype(tensor, name, dtype);
  check_device(tensor, name, other, other_name);
  check_layout(tensor, name, pattern);
  TORCH_CHECK_VALUE(tensor.size(0) == size, name, " must be ", pattern, ", that is ", size, " long, got ",
                    tensor.size(0));
}

void check_caches(const Tensor& key_cache, const Tensor& value_cache) {
  dtype_of(key_cache, "key_cache");
  check_same_dtype(value_cache, "value_cache", key_cache, "key_cache");
  check_device(value_cache, "value_cache", key_cache, "key_cache");
  check_layout(key_cache, "key_cache", "[num_blocks, block_size, num_kv_heads, head_dim]");
  check_layout(value_cache, "value_cache", "[num_blocks, block_size, num_kv_heads, head_dim]");
  check_size(value_cache, "value_cache", 0, key_cache.size(0), "num_blocks of key_cache");
  check_size(value_cache, "value_cache", 1, key_cache.size(1), "block_size of key_cache");
  check_size(value_cache, "value_cache", 2, key_cache.size(2), "num_kv_heads of key_cache");
  TORCH_CHECK_VALUE(key_cache.size(1) >= 1, "key_cache has the shape ", key_cache.sizes(),
                    "; block_size must be at least 1");
  TORCH_CHECK_VALUE(key_cache.size(1) <= std::numeric_limits<int32_t>::max(), "key_cache has the shape ",
                    key_cache.sizes(), "; positions are int32, and so is block_size");
  TORCH_CHECK_VALUE(key_cache.size(2) >= 1, "key_cache has the shape ", key_cache.sizes(),
                    "; num_kv_heads must be at least 1");
}

namespace {

void check_scale(const Tensor& cache, const OptionalTensor& scale, std::optional<double> scale_value,
                 const char* name) {
  const bool given = scale.has_value() || scale_value.has_value();
  const DType dtype = dtype_of(cache, "key_cache");
  TORCH_CHECK_VALUE(
      !given || is_quantised(dtype), name, " was given, but a ", cache.scalar_type(),
      " cache stores values as they are; scales go with float8_e4m3fn, float8_e5m2 and int8 caches");
  TORCH_CHECK_VALUE(
      given || dtype != DType::int8, name,
      " is missing: an int8 cache needs both k_scale and v_scale (a float, or float32 [num_kv_heads])");
  if (scale.has_value()) {
    check_vector(*scale, name, at::kFloat, cache.size(2), "[num_kv_heads]", cache, "the cache");
  }
}

}  // namespace

void check_scales(const Tensor& cache, const OptionalTensor& k_scale, std::optional<double> k_scale_value,
                  const OptionalTensor& v_scale, std::optional<double> v_scale_value) {
  check_scale(cache, k_scale, k_scale_value, "k_scale");
  check_scale(cache, v_scale, v_scale_value, "v_scale");
}

void check_attention_head_dim(int64_t head_dim, const char* name) {
  TORCH_CHECK_VALUE(head_dim >= 8 && head_dim <= 256 && head_dim % 8 == 0, name, " has head_dim ", head_dim,
                    "; supported: every multiple of 8 from 8 to 256");
}

bool runs_on_device([[maybe_unused]] const Tensor& tensor) {
#if defined(PAGEDKV_EMULATED)
  return true;
#else
  return !tensor.is_cpu();
#endif
}

bool indices_are_checked(const Tensor& indices) { return !runs_on_device(indices) || debug_mode; }

void set_debug(bool on) { debug_mode = on; }

void check_tables(const Tensor& block_tables, const Tensor& context_lens, const OptionalTensor& kv_starts,
                  const Tensor& cache) {
  check_dtype(block_tables, "block_tables", at::kInt);
  check_device(block_tables, "block_tables", cache, "key_cache");
  check_layout(block_tables, "block_tables", "[num_seqs, max_blocks_per_seq]");
  const int64_t num_seqs = block_tables.size(0);
  check_vector(context_lens, "context_lens", at::kInt, num_seqs, "[num_seqs]", cache, "key_cache");
  if (kv_starts.has_value()) {
    check_vector(*kv_starts, "kv_starts", at::kInt, num_seqs, "[num_seqs]", cache, "key_cache");
  }
}

void check_slots(const Tensor& slot_mapping, int64_t num_slots) {
  if (!indices_are_checked(slot_mapping)) return;
  const Tensor slots = slot_mapping.cpu();
  const auto* slot = slots.const_data_ptr<int64_t>();
  for (int64_t token_idx = 0; token_idx < slots.size(0); ++token_idx) {
    TORCH_CHECK_INDEX(slot[token_idx] < num_slots, "slot_mapping[", token_idx, "] is ", slot[token_idx],
                      ", outside the cache of ", num_slots, " slots");
  }
}

void inference_only(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (c10::GradMode::is_enabled()) {
    const auto num_arguments = op.schema().arguments().size();
    const auto refuse = [&](const Tensor& tensor, size_t argument_idx) {
      TORCH_CHECK(!tensor.defined() || !tensor.requires_grad(), op.schema().name(), ": ",
                  op.schema().arguments()[argument_idx].name(),
                  " requires grad, but pagedkv is for inference only; call it under torch.no_grad() or "
                  "torch.inference_mode(), or detach the input");
    };
    for (size_t i = 0; i < num_arguments; ++i) {
      const c10::IValue& argument = torch::jit::peek(*stack, i, num_arguments);
      if (argument.isTensor()) {
        refuse(argument.toTensor(), i);
      } else if (argument.isTensorList()) {
        for (const Tensor& tensor : argument.toTensorVector()) refuse(tensor, i);
      }
    }
  }
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

#if defined(PAGEDKV_EMULATED) || defined(PAGEDKV_WITH_CUDA)
void check_cuda(const char* op, cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // forgotten, or torch would raise it once more after its next kernel
  TORCH_CHECK(false, "pagedkv::", op, " failed on the device: ", cudaGetErrorString(error),
              " (`python -m pagedkv` shows the architectures that were built; pagedkv.set_debug(True) checks "
              "indices)");
}
#endif

}  // namespace pagedkv::bindings

TORCH_LIBRARY_FRAGMENT(PAGEDKV_NAMESPACE, m) {
  m.def("_set_debug(bool on) -> ()", &pagedkv::bindings::set_debug);
}
