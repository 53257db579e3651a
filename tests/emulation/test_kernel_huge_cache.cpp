// Every kernel that computes an offset into a cache, on one whose blocks lie beyond 2**31 bytes and elements
// and 2**32 elements: only the pages that are touched take memory, and there is memory where a 32-bit offset
// would wrap to.
#include <sys/mman.h>

#include "attention_case.h"

namespace pagedkv::emulator {
namespace {

constexpr int64_t BLOCK_STRIDE = 1 << 20, BLOCK_SIZE = 16, HEAD_DIM = 16, NUM_BLOCKS = 4100;
constexpr int64_t CACHE_DISTANCE = BLOCK_SIZE * HEAD_DIM;  // a block's values follow its keys
constexpr int64_t ELEMENT_BYTES = 2, ROOM_BELOW = int64_t{1} << 31;
constexpr size_t POOL_BYTES = ELEMENT_BYTES * (ROOM_BELOW + NUM_BLOCKS * BLOCK_STRIDE);
const std::vector<int32_t> BLOCKS = {511, 1024, 2048, 2049, 4097};
const auto CONTEXT_LEN = static_cast<int32_t>(BLOCKS.size() * BLOCK_SIZE);

struct Pool {
  void* memory =
      mmap(nullptr, POOL_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  unsigned char* keys = static_cast<unsigned char*>(memory) + ELEMENT_BYTES * ROOM_BELOW;
  unsigned char* values = keys + ELEMENT_BYTES * CACHE_DISTANCE;
  ~Pool() { munmap(memory, POOL_BYTES); }
};

template <class Params>
void set_cache(const Pool& pool, Params& params) {
  params.key_cache = pool.keys;
  params.value_cache = pool.values;
  params.cache_dtype = DType::bfloat16;
  params.num_kv_heads = 1;
  params.head_dim = params.value_head_dim = params.key_cache_head_stride = params.value_cache_head_stride =
      params.key_cache_token_stride = params.value_cache_token_stride = HEAD_DIM;
  params.key_cache_block_stride = params.value_cache_block_stride = BLOCK_STRIDE;
  params.num_blocks = NUM_BLOCKS;
  params.block_size = BLOCK_SIZE;
}

void write_rows(const Pool& pool, const Bytes& keys, const Bytes& values) {
  std::vector<int64_t> slots;
  for (int64_t token = 0; token < CONTEXT_LEN; ++token) {
    slots.push_back(BLOCKS[static_cast<size_t>(token / BLOCK_SIZE)] * BLOCK_SIZE + token % BLOCK_SIZE);
  }
  ReshapeAndCacheParams params{};
  set_cache(pool, params);
  params.key = keys.data();
  params.value = values.data();
  params.slot_mapping = slots.data();
  params.input_dtype = DType::bfloat16;
  params.num_tokens = CONTEXT_LEN;
  params.key_token_stride = params.value_token_stride = HEAD_DIM;
  CHECK(cuda::reshape_and_cache(params, nullptr) == cudaSuccess);
}

void check_gathered(const Pool& pool, const Bytes& keys, const Bytes& values) {
  Bytes gathered_keys(keys.size()), gathered_values(values.size());
  std::vector<int64_t> token_offsets(2);
  GatherKvParams params{};
  set_cache(pool, params);
  params.block_tables = BLOCKS.data();
  params.context_lens = &CONTEXT_LEN;
  params.key = gathered_keys.data();
  params.value = gathered_values.data();
  params.token_offsets = token_offsets.data();
  params.out_dtype = DType::bfloat16;
  params.total_tokens = CONTEXT_LEN;
  params.num_seqs = 1;
  params.max_blocks_per_seq = params.block_tables_seq_stride = static_cast<int64_t>(BLOCKS.size());
  CHECK(cuda::gather_kv(params, nullptr) == cudaSuccess);
  CHECK(gathered_keys == keys);
  CHECK(gathered_values == values);
}

void check_attention(const Pool& pool) {
  AttentionCase attention({DType::bfloat16, DType::bfloat16, HEAD_DIM, 2, 1, BLOCK_SIZE, {1}, {CONTEXT_LEN}});
  PagedAttentionParams& p = attention.params;
  set_cache(pool, p);
  p.block_tables = BLOCKS.data();
  p.max_blocks_per_seq = p.block_tables_seq_stride = static_cast<int64_t>(BLOCKS.size());
  Bytes out, expected_out;
  std::vector<float> lse, expected_lse;
  attention.run(false, expected_out, expected_lse);
  CHECK(attention.run(true, out, lse) == cudaSuccess);
  check_close(attention, out, lse, expected_out, expected_lse);
}

void check_copied(const Pool& pool) {
  const int64_t stride_bytes = BLOCK_STRIDE * ELEMENT_BYTES, block_bytes = 2 * CACHE_DISTANCE * ELEMENT_BYTES;
  const BlockLayout layout{reinterpret_cast<char*>(pool.keys),
                           NUM_BLOCKS,
                           stride_bytes,
                           1,
                           block_bytes,
                           1,
                           block_bytes,
                           block_bytes};
  const std::vector<BlockPair> pairs = {{2049, 3000}, {511, 4099}};
  CopyBlocksParams params{};
  params.sources = params.destinations = &layout;
  params.pairs = pairs.data();
  params.num_caches = 1;
  params.num_pairs = static_cast<int64_t>(pairs.size());
  CHECK(cuda::copy_blocks(params, nullptr) == cudaSuccess);
  for (const BlockPair& pair : pairs) {
    CHECK(std::memcmp(pool.keys + pair.source * stride_bytes, pool.keys + pair.destination * stride_bytes,
                      static_cast<size_t>(block_bytes)) == 0);
  }
}

TEST(kernel_huge_cache) {
  const Pool pool;
  if (!CHECK(pool.memory != MAP_FAILED)) return;
  const Bytes keys = random_elements(DType::bfloat16, CONTEXT_LEN * HEAD_DIM);
  const Bytes values = random_elements(DType::bfloat16, CONTEXT_LEN * HEAD_DIM);
  write_rows(pool, keys, values);
  check_gathered(pool, keys, values);
  check_attention(pool);
  check_copied(pool);
}

}  // namespace
}  // namespace pagedkv::emulator
