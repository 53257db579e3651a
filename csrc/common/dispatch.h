// From run-time dtypes to types, by generic lambdas:
//
//   dispatch_dtype(params.cache_dtype, [&]<class T>() { kernel<T>(params); });
#pragma once

#include <stdexcept>
#include <string>

#include "common/dtypes.h"
#include "params.h"

namespace pagedkv {

[[noreturn]] inline void unsupported_dtype(const char* what, DType dtype, const char* supported) {
  throw std::logic_error(std::string("pagedkv: ") + what + " reached a kernel with dtype code " +
                         std::to_string(static_cast<int>(dtype)) + "; supported: " + supported);
}

// float16, bfloat16, float32: what queries, keys, values and outputs may be.
template <class Body>
void dispatch_float_dtype(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::float16:
      return body.template operator()<float16>();
    case DType::bfloat16:
      return body.template operator()<bfloat16>();
    case DType::float32:
      return body.template operator()<float>();
    default:
      unsupported_dtype("a float tensor", dtype, "float16, bfloat16, float32");
  }
}

// Every dtype that a cache may have.
template <class Body>
void dispatch_dtype(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::float8_e4m3fn:
      return body.template operator()<float8_e4m3fn>();
    case DType::float8_e5m2:
      return body.template operator()<float8_e5m2>();
    case DType::int8:
      return body.template operator()<int8_t>();
    default:
      dispatch_float_dtype(dtype, body);
  }
}

// The legal pairs of a float input and a cache that stores it: the same dtype, or a quantised one.
template <class Body>
void dispatch_cache_pair(DType input_dtype, DType cache_dtype, Body&& body) {
  dispatch_float_dtype(input_dtype, [&]<class Input>() {
    if (input_dtype == cache_dtype) return body.template operator()<Input, Input>();
    dispatch_dtype(cache_dtype, [&]<class Cache>() {
      if constexpr (is_quantised_v<Cache>) {
        body.template operator()<Input, Cache>();
      } else {
        unsupported_dtype("a cache", cache_dtype, "the input's dtype, float8_e4m3fn, float8_e5m2, int8");
      }
    });
  });
}

}  // namespace pagedkv
