"""Paged KV cache and paged attention for PyTorch, on CPU and CUDA."""

from pagedkv import _loader as _loader  # first: where pagedkv is not built it says so
from pagedkv._core import BlockAllocator, BlockTable, OutOfMemoryError
from pagedkv.cache import PagedKVCache
from pagedkv.ops import (
    copy_blocks,
    gather_kv,
    merge_attn_states,
    paged_attention,
    reshape_and_cache,
    rope_and_cache,
    set_debug,
    swap_blocks,
)

__version__ = "0.1.0"

__all__ = [
    "BlockAllocator",
    "BlockTable",
    "OutOfMemoryError",
    "PagedKVCache",
    "copy_blocks",
    "gather_kv",
    "merge_attn_states",
    "paged_attention",
    "reshape_and_cache",
    "rope_and_cache",
    "set_debug",
    "swap_blocks",
]
