// key[i], value[i] = dequantised cache rows of every sequence's tokens, one sequence after another.
//
// Work: one CTA first adds up token_offsets. Then each CTA takes TOKENS_PER_CTA output rows, a warp one row
// at a time: it finds the row's sequence by bisection of token_offsets, and its lanes run over (head, 16-byte
// piece). Bytes: each cached row is read once, each output row written once. A row past the last token, or
// whose block is outside the pool, is 0.
#include "common/dispatch.h"
#include "cuda/rows.h"
#include "ops.h"

namespace pagedkv::cuda {

namespace {

constexpr int WARP_THREADS = 32;
constexpr int CTA_THREADS = 256;
constexpr int CTA_WARPS = CTA_THREADS / WARP_THREADS;
constexpr int64_t TOKENS_PER_CTA = 2 * CTA_WARPS;

struct Launch {
  GatherKvParams p;
  bool keys_aligned, values_aligned;
};

PAGEDKV_DEVICE int64_t first_token(const GatherKvParams& p, int64_t seq_idx) {
  return p.kv_starts != nullptr ? max_of<int64_t>(0, p.kv_starts[seq_idx]) : 0;
}

// token_offsets[s] = the sum of the sequences before s: every thread adds up a slice, and the slices' sums
// are added up by doubling strides in shared memory (Hillis and Steele 1986).
__global__ void __launch_bounds__(CTA_THREADS) token_offsets_kernel(const GatherKvParams p) {
  PAGEDKV_SHARED(shared);
  auto* sums = reinterpret_cast<int64_t*>(shared);  // [CTA_THREADS]
  const int thread_idx = threadIdx.x;
  const int64_t slice = ceil_div(p.num_seqs, CTA_THREADS);
  const int64_t begin = min_of<int64_t>(thread_idx * slice, p.num_seqs),
                end = min_of(begin + slice, p.num_seqs);
  const auto num_tokens = [&](int64_t seq_idx) {
    return max_of<int64_t>(0, p.context_lens[seq_idx] - first_token(p, seq_idx));
  };
  int64_t sum = 0;
  for (int64_t seq_idx = begin; seq_idx < end; ++seq_idx) sum += num_tokens(seq_idx);
  sums[thread_idx] = sum;
  __syncthreads();
  for (int stride = 1; stride < CTA_THREADS; stride *= 2) {
    const int64_t before = thread_idx >= stride ? sums[thread_idx - stride] : 0;
    __syncthreads();
    sums[thread_idx] += before;
    __syncthreads();
  }
  int64_t offset = sums[thread_idx] - sum;
  for (int64_t seq_idx = begin; seq_idx < end; ++seq_idx) {
    p.token_offsets[seq_idx] = offset;
    offset += num_tokens(seq_idx);
  }
  if (thread_idx == CTA_THREADS - 1) p.token_offsets[p.num_seqs] = offset;
}

// The last sequence whose first row is at or before out_idx.
PAGEDKV_DEVICE int64_t sequence_of(const GatherKvParams& p, int64_t out_idx) {
  int64_t low = 0, high = p.num_seqs;  // token_offsets[low] <= out_idx < token_offsets[high]
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (p.token_offsets[middle] <= out_idx ? low : high) = middle;
  }
  return low;
}

template <class Cache, class Out>
PAGEDKV_DEVICE void gather_token(const Launch& launch, int64_t out_idx, int lane) {
  const GatherKvParams& p = launch.p;
  int64_t block = -1, token_in_block = 0;
  if (out_idx < p.token_offsets[p.num_seqs]) {
    const int64_t seq_idx = sequence_of(p, out_idx);
    const int64_t token = first_token(p, seq_idx) + out_idx - p.token_offsets[seq_idx];
    block = block_of_token(p, seq_idx, token);
    token_in_block = token % p.block_size;
  }
  const auto* key_cache = static_cast<const Cache*>(p.key_cache);
  const auto* value_cache = static_cast<const Cache*>(p.value_cache);
  Out* key = static_cast<Out*>(p.key) + out_idx * p.num_kv_heads * p.head_dim;
  Out* value = static_cast<Out*>(p.value) + out_idx * p.num_kv_heads * p.value_head_dim;
  if (block < 0) {
    for (int64_t i = lane; i < p.num_kv_heads * p.head_dim; i += WARP_THREADS) key[i] = Out{};
    for (int64_t i = lane; i < p.num_kv_heads * p.value_head_dim; i += WARP_THREADS) value[i] = Out{};
    return;
  }
  const auto load = [](float scale, Cache element) {
    if constexpr (std::is_same_v<Cache, Out>) {
      return element;
    } else {
      return from_float<Out>(is_quantised_v<Cache> ? to_float(element) * scale : to_float(element));
    }
  };
  move_rows<Cache, Out>(
      launch.keys_aligned, p.num_kv_heads, p.head_dim, lane, WARP_THREADS,
      [&](int64_t kv_head_idx) {
        return key_cache + cache_offset(key_cache_strides(p), block, token_in_block, kv_head_idx);
      },
      [&](int64_t kv_head_idx) { return key + kv_head_idx * p.head_dim; },
      [&](int64_t kv_head_idx, Cache element) {
        return load(scale_of(p.k_scale, p.k_scale_value, kv_head_idx), element);
      });
  move_rows<Cache, Out>(
      launch.values_aligned, p.num_kv_heads, p.value_head_dim, lane, WARP_THREADS,
      [&](int64_t kv_head_idx) {
        return value_cache + cache_offset(value_cache_strides(p), block, token_in_block, kv_head_idx);
      },
      [&](int64_t kv_head_idx) { return value + kv_head_idx * p.value_head_dim; },
      [&](int64_t kv_head_idx, Cache element) {
        return load(scale_of(p.v_scale, p.v_scale_value, kv_head_idx), element);
      });
}

// Two CTAs to an SM are named, since the compiler would aim at more and spill.
template <class Cache>
__global__ void __launch_bounds__(CTA_THREADS, 2) gather_kv_kernel(const Launch launch) {
  const int warp_idx = threadIdx.x / WARP_THREADS, lane_idx = threadIdx.x % WARP_THREADS;
  const int64_t begin = blockIdx.x * TOKENS_PER_CTA;
  const int64_t end = min_of(begin + TOKENS_PER_CTA, launch.p.total_tokens);
  for (int64_t out_idx = begin + warp_idx; out_idx < end; out_idx += CTA_WARPS) {
    with_float_dtype(launch.p.out_dtype,
                     [&]<class Out>() { gather_token<Cache, Out>(launch, out_idx, lane_idx); });
  }
}

}  // namespace

cudaError_t gather_kv(const GatherKvParams& p, cudaStream_t stream) {
  const int64_t cache_bytes = element_bytes(p.cache_dtype), out_bytes = element_bytes(p.out_dtype);
  Launch args;
  args.p = p;
  args.keys_aligned =
      rows_are_aligned({p.key_cache,
                        cache_bytes,
                        {p.key_cache_block_stride, p.key_cache_token_stride, p.key_cache_head_stride}},
                       {p.key, out_bytes, {p.head_dim, 0, 0}}, p.head_dim);
  args.values_aligned =
      rows_are_aligned({p.value_cache,
                        cache_bytes,
                        {p.value_cache_block_stride, p.value_cache_token_stride, p.value_cache_head_stride}},
                       {p.value, out_bytes, {p.value_head_dim, 0, 0}}, p.value_head_dim);
  cudaError_t error =
      launch(token_offsets_kernel, dim3(1), dim3(CTA_THREADS), CTA_THREADS * sizeof(int64_t), stream, p);
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(ceil_div(p.total_tokens, TOKENS_PER_CTA)));
  dispatch_dtype(p.cache_dtype, [&]<class Cache>() {
    error = launch(gather_kv_kernel<Cache>, grid, dim3(CTA_THREADS), 0, stream, args);
  });
  return error;
}

}  // namespace pagedkv::cuda
