"""vLLM's block managers on the traces of bench_manager.py, called as its scheduler and model runner do."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from bench_manager import BLOCK_SIZE, POOL, mixed_operations, replay, requests, timed

_NUMBERS = itertools.count()


def contenders() -> dict[str, Callable[[], dict[str, Callable[[], float]]]]:
    """By trace; empty, with a word about it, where vLLM is not there."""
    try:
        from vllm.v1.core.kv_cache_manager import KVCacheManager  # noqa: F401
    except ImportError as error:
        print(f"vLLM cannot be imported ({error}): no peers")
        return {}
    return {"T1": t1, "T2": t2, "T3": t3, "T6": t6}


def make_manager(num_blocks: int, enable_caching: bool = True) -> Any:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)
    config = KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return KVCacheManager(
        config,
        max_model_len=131_072,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        enable_caching=enable_caching,
    )


def make_request(tokens: list[int]) -> Any:
    """Its blocks are hashed when it is made."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    return Request(str(next(_NUMBERS)), tokens, SamplingParams(max_tokens=4096), None, block_hasher=hasher())


def hasher() -> Any:
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core import kv_cache_utils

    if not hasattr(hasher, "made"):
        kv_cache_utils.init_none_hash(sha256_cbor)
        hasher.made = kv_cache_utils.get_request_block_hasher(BLOCK_SIZE, sha256_cbor)  # type: ignore[attr-defined]
    return hasher.made  # type: ignore[attr-defined]


def t1() -> dict[str, Callable[[], float]]:
    from vllm.v1.core.block_pool import BlockPool

    pool = BlockPool(POOL, enable_caching=True, hash_block_size=BLOCK_SIZE)
    operations = mixed_operations(1500)
    return {"T1 vLLM": lambda: replay(operations, pool.get_new_blocks, pool.free_blocks)}


def admit(manager: Any, request: Any) -> None:
    """Look up, allocate, count as computed: what the scheduler does with a new request."""
    blocks, num_computed = manager.get_computed_blocks(request)[:2]
    manager.allocate_slots(request, request.num_tokens - num_computed, num_computed, blocks)
    request.num_computed_tokens = request.num_tokens


def t2() -> dict[str, Callable[[], float]]:
    manager = make_manager(POOL, enable_caching=False)
    lens = np.random.default_rng(2).integers(128, 4096, 256).tolist()
    running = [make_request([1] * n) for n in lens]
    for request in running:
        admit(manager, request)
    table = np.zeros((256, 512), dtype=np.int32)
    num_blocks = [0] * 256
    for i, request in enumerate(running):
        ids = manager.get_block_ids(request.request_id)[0]
        table[i, : len(ids)] = ids
        num_blocks[i] = len(ids)
    rows = np.arange(256)

    def step() -> None:
        for i, request in enumerate(running):
            request.append_output_token_ids(1)
            new = manager.allocate_slots(request, 1).get_block_ids()[0]
            if new:
                table[i, num_blocks[i] : num_blocks[i] + len(new)] = new
                num_blocks[i] += len(new)
            request.num_computed_tokens += 1
        positions = np.array([request.num_computed_tokens - 1 for request in running])
        blocks = table[rows, positions // BLOCK_SIZE].astype(np.int64)
        _ = blocks * BLOCK_SIZE + positions % BLOCK_SIZE

    return {"T2 vLLM": lambda: timed(step, 1)}


def serve(manager: Any, source: Any) -> float:
    prompts = [next(source).tolist() for _ in range(20)]
    begin = time.perf_counter()
    for prompt in prompts:
        request = make_request(prompt)
        admit(manager, request)
        manager.free(request)
    return (time.perf_counter() - begin) / len(prompts)


def t3() -> dict[str, Callable[[], float]]:
    roomy, tight = make_manager(POOL), make_manager(4096)
    sources = [requests(3), requests(3)]
    for _ in range(5):
        serve(tight, sources[1])
    return {
        "T3 vLLM": lambda: serve(roomy, sources[0]),
        "T4 vLLM": lambda: serve(tight, sources[1]),
    }


def t6() -> dict[str, Callable[[], float]]:
    tokens = np.random.default_rng(6).integers(0, 128_000, 65_536).tolist()
    manager = make_manager(8192)
    admit(manager, make_request(tokens))
    return {"T6 vLLM": lambda: timed(lambda: manager.get_computed_blocks(make_request(tokens)), 1)}
