// Loops of a CTA over the rows of the cache operators: 16-byte accesses where every row allows them, single
// elements elsewhere.
#pragma once

#include <type_traits>

#include "common/device.h"
#include "common/dtypes.h"
#include "common/paging.h"
#include "params.h"

namespace pagedkv::cuda {

inline constexpr int VECTOR_BYTES = 16;

// N elements that are loaded or stored by one access.
template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T item[N];
};

template <class T, int N>
PAGEDKV_DEVICE Pack<T, N> load_pack(const T* source) {
  if constexpr (sizeof(T) * N == 1) {
    return {{*source}};
  } else {
    return load_vector<Pack<T, N>>(source);
  }
}

template <class T, int N>
PAGEDKV_DEVICE void store_pack(T* destination, const Pack<T, N>& pack) {
  if constexpr (sizeof(T) * N == 1) {
    *destination = pack.item[0];
  } else {
    store_vector(destination, pack);
  }
}

// Elements per access for a row that is read as From and written as To.
template <class From, class To>
inline constexpr int PACK_SIZE = VECTOR_BYTES / (sizeof(From) > sizeof(To) ? sizeof(From) : sizeof(To));

// What the host knows of a set of rows: whether all of them start at a multiple of `num_elements`.
struct RowAlignment {
  const void* base;
  int64_t element_bytes;
  int64_t strides[3];  // in elements; 0 where there are fewer

  bool holds(int64_t num_elements) const {
    const auto address = reinterpret_cast<uintptr_t>(base);
    return address % (num_elements * element_bytes) == 0 && strides[0] % num_elements == 0 &&
           strides[1] % num_elements == 0 && strides[2] % num_elements == 0;
  }
};

inline int64_t element_bytes(DType dtype) {
  return dtype == DType::float32 ? 4 : (dtype == DType::float16 || dtype == DType::bfloat16 ? 2 : 1);
}

// Whether rows of row_size elements can be moved from one set to the other by whole packs.
inline bool rows_are_aligned(const RowAlignment& from, const RowAlignment& to, int64_t row_size) {
  const int64_t pack_size = VECTOR_BYTES / max_of(from.element_bytes, to.element_bytes);
  return row_size % pack_size == 0 && from.holds(pack_size) && to.holds(pack_size);
}

// The threads `lane`, `lane` + num_lanes, ... of a group move num_rows rows of one token, whose elements an
// int can count: convert(row, element) gives an element of To. from_row and to_row turn a row index into a
// pointer.
template <int N, class From, class To, class FromRow, class ToRow, class Convert>
PAGEDKV_DEVICE void move_packs(int num_rows, int row_size, int lane, int num_lanes, FromRow&& from_row,
                               ToRow&& to_row, Convert&& convert) {
  constexpr int BATCH = std::is_same_v<From, To> ? 4 : 1;  // packs that are on their way together
  const int packs_per_row = row_size / N, num_packs = num_rows * packs_per_row;
#pragma unroll 1
  for (int first = lane; first < num_packs; first += BATCH * num_lanes) {
    Pack<From, N> from[BATCH];
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      const int i = first + j * num_lanes;
      if (i >= num_packs) break;
      from[j] = load_pack<From, N>(from_row(i / packs_per_row) + i % packs_per_row * N);
    }
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
      const int i = first + j * num_lanes, row = i / packs_per_row;
      if (i >= num_packs) break;
      Pack<To, N> to;
      for (int k = 0; k < N; ++k) to.item[k] = convert(row, from[j].item[k]);
      store_pack<To, N>(to_row(row) + i % packs_per_row * N, to);
    }
  }
}

template <class From, class To, class FromRow, class ToRow, class Convert>
PAGEDKV_DEVICE void move_rows(bool aligned, int64_t num_rows, int64_t row_size, int lane, int num_lanes,
                              FromRow&& from_row, ToRow&& to_row, Convert&& convert) {
  const int rows = static_cast<int>(num_rows), size = static_cast<int>(row_size);
  if (aligned) {
    move_packs<PACK_SIZE<From, To>, From, To>(rows, size, lane, num_lanes, from_row, to_row, convert);
  } else {
    move_packs<1, From, To>(rows, size, lane, num_lanes, from_row, to_row, convert);
  }
}

// Runs body<T>() for the float dtype that a kernel learns at run time; a template parameter would triple the
// kernels.
template <class Body>
PAGEDKV_DEVICE void with_float_dtype(DType dtype, Body&& body) {
  if (dtype == DType::float16) {
    body.template operator()<float16>();
  } else if (dtype == DType::bfloat16) {
    body.template operator()<bfloat16>();
  } else {
    body.template operator()<float>();
  }
}

}  // namespace pagedkv::cuda
