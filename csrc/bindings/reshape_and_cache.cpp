#include "bindings/checks.h"
#include "bindings/write_params.h"

namespace pagedkv::bindings {

static void reshape_and_cache(const Tensor& key, const Tensor& value, const Tensor& key_cache,
                              const Tensor& value_cache, const Tensor& slot_mapping,
                              const OptionalTensor& k_scale, const OptionalTensor& v_scale,
                              std::optional<double> k_scale_value, std::optional<double> v_scale_value) {
  const ReshapeAndCacheParams params = write_params(key, value, key_cache, value_cache, slot_mapping, k_scale,
                                                    v_scale, k_scale_value, v_scale_value);
  if (params.num_tokens == 0) return;
  PAGEDKV_RUN(reshape_and_cache, key_cache.device(), params);
}

}  // namespace pagedkv::bindings

PAGEDKV_OP(reshape_and_cache,
           "(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, "
           "Tensor? k_scale, Tensor? v_scale, float? k_scale_value, float? v_scale_value) -> ()")
