"""paged_attention: every option with every dtype, and every shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import (
    DTYPE_PAIRS,
    FLOAT_DTYPES,
    QUANTIZED_DTYPES,
    Backend,
    build_case,
    check_attention,
    dtype_name,
    poisoned,
)

OPERATORS = ("paged_attention",)

CONTEXT_LENS = [9, 0, 1, 23, 4]
QUERY_LENS = [3, 0, 1, 6, 4]
NUM_HEADS = 4

# Each set of options is crossed with each pair of dtypes; `materialise` puts tensors where names stand.
OPTION_SETS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softmax_scale": {"softmax_scale": 0.37},
    "non_causal": {"causal": False},
    "window": {"window": 5},
    "window_non_causal": {"window": 3, "causal": False},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": "slopes"},
    "sinks": {"sinks": "logits"},
    "kv_starts": {"kv_starts": [4, 0, 0, 11, 3]},
    "tree": {"tree_mask": "mask"},
    "tree_window": {"tree_mask": "mask", "window": 7},
    "split_small": {"split_size": 3},
    "split_64": {"split_size": 64},
    "hint": {"max_query_len": 1_000_000},
    "all": {
        "softmax_scale": 0.5,
        "window": 9,
        "softcap": 2.0,
        "alibi_slopes": "slopes",
        "sinks": "logits",
        "kv_starts": [2, 0, 0, 5, 1],
        "tree_mask": "mask",
        "split_size": 4,
        "max_query_len": 8,
    },
}


def materialise(options: dict[str, Any], num_tokens: int, device: torch.device) -> dict[str, Any]:
    """Replace the named placeholders of `OPTION_SETS` by tensors."""
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "slopes": 2.0 ** -torch.arange(1.0, NUM_HEADS + 1).to(device),
        "logits": torch.randn(NUM_HEADS, generator=generator).to(device),
        "mask": (torch.rand(num_tokens, 6, generator=generator) < 0.6).to(device),
    }
    return {k: tensors[v] if isinstance(v, str) else v for k, v in options.items()}


@pytest.mark.parametrize("option_set", OPTION_SETS)
@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPE_PAIRS, ids=dtype_name)
def test_every_option_with_every_dtype(
    backend: Backend, dtype: torch.dtype, cache_dtype: torch.dtype, phase: str, option_set: str
) -> None:
    query_lens = QUERY_LENS if phase == "prefill" else None
    num_tokens = sum(QUERY_LENS) if phase == "prefill" else len(CONTEXT_LENS)
    case = build_case(
        CONTEXT_LENS,
        query_lens,
        device=backend.device,
        num_heads=NUM_HEADS,
        dtype=dtype,
        cache_dtype=cache_dtype,
        strided_query=True,
        **materialise(OPTION_SETS[option_set], num_tokens, backend.device),
    )
    check_attention(backend, case)


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_every_head_dim(backend: Backend, head_dim: int) -> None:
    for dtype, cache_dtype in ((torch.float32, None), (torch.bfloat16, None), (torch.float16, torch.int8)):
        case = build_case(
            [1, 21, 6],
            [1, 2, 3],
            device=backend.device,
            head_dim=head_dim,
            dtype=dtype,
            cache_dtype=cache_dtype,
            seed=head_dim,
        )
        check_attention(backend, case)


@pytest.mark.parametrize("query_lens", [None, [5, 2], [40, 3]], ids=["decode", "extend", "prefill"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPE_PAIRS, ids=dtype_name)
def test_every_dtype_with_few_and_many_rows(
    backend: Backend,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    head_dim: int,
    query_lens: list[int] | None,
) -> None:
    """The CUDA back-end has a kernel for each of these."""
    case = build_case(
        [70, 3], query_lens, device=backend.device, head_dim=head_dim, dtype=dtype, cache_dtype=cache_dtype
    )
    check_attention(backend, case)


@pytest.mark.parametrize("head_dim", [16, 32, 40, 64, 72, 80, 96, 112, 120, 128, 160, 192, 256, 512])
def test_kernel_picked_for_wrong_head_dim(backend: Backend, head_dim: int) -> None:
    case = build_case([37, 5], device=backend.device, head_dim=head_dim, block_size=16)
    if head_dim > 256:
        with pytest.raises(ValueError, match=r"head_dim.*512.*8.*256"):
            case.run(backend)
        return
    check_attention(backend, case)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=dtype_name)
@pytest.mark.parametrize("head_dim", [80, 96, 112, 120, 160, 192])
def test_head_dim_not_pow2(backend: Backend, head_dim: int, dtype: torch.dtype) -> None:
    # "padded" and strided_query put NaN heads and NaN elements beside everything that is read.
    case = build_case(
        [19, 33],
        [4, 33],
        device=backend.device,
        head_dim=head_dim,
        dtype=dtype,
        layout="padded",
        strided_query=True,
    )
    check_attention(backend, case)


@pytest.mark.parametrize(
    ("head_dim", "value_head_dim"), [(192, 128), (64, 8), (8, 256), (24, 40), (256, 248)]
)
@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPE_PAIRS, ids=dtype_name)
def test_k_and_v_head_dim_differ(
    backend: Backend, dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, value_head_dim: int
) -> None:
    case = build_case(
        [5, 18],
        [2, 1],
        device=backend.device,
        head_dim=head_dim,
        value_head_dim=value_head_dim,
        dtype=dtype,
        cache_dtype=cache_dtype,
        layout="interleaved",
    )
    out = check_attention(backend, case)
    assert out.shape == (3, 4, value_head_dim)


@pytest.mark.parametrize("block_size", [1, 2, 3, 7, 8, 12, 16, 24, 48, 100, 128, 256, 544])
def test_block_size_not_pow2(backend: Backend, block_size: int) -> None:
    for cache_dtype in (torch.float32, torch.float8_e4m3fn):
        case = build_case(
            [1, block_size - 1, block_size, block_size + 1, 3 * block_size - 1],
            device=backend.device,
            head_dim=8,
            block_size=block_size,
            cache_dtype=cache_dtype,
        )
        check_attention(backend, case)


@pytest.mark.parametrize("block_size", [256, 512])
def test_large_page_size_wrong(backend: Backend, block_size: int) -> None:
    context_lens = [1, 129, 255, 256, 257, 700]
    case = build_case(
        context_lens, device=backend.device, head_dim=64, block_size=block_size, dtype=torch.bfloat16
    )
    check_attention(backend, case)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_kv_len_not_multiple_of_block(backend: Backend, phase: str) -> None:
    context_lens = [64, *range(1, 33)]
    query_lens = [min(2, length) for length in context_lens] if phase == "prefill" else None
    for block_size in (16, 128):
        case = build_case(context_lens, query_lens, device=backend.device, head_dim=8, block_size=block_size)
        check_attention(backend, case)


HEAD_RATIOS = [
    (7, 1),
    (14, 2),
    (12, 2),
    (15, 3),
    (9, 1),
    (28, 4),
    (71, 1),
    (24, 2),
    (5, 5),
    (64, 1),
    (1, 1),
    (33, 3),
]


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEAD_RATIOS)
@pytest.mark.parametrize("query_len", [1, 3])
def test_gqa_ratio_not_pow2(backend: Backend, num_heads: int, num_kv_heads: int, query_len: int) -> None:
    case = build_case(
        [21], [query_len], device=backend.device, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=8
    )
    check_attention(backend, case)
    case.key_cache.zero_()
    case.value_cache.copy_(torch.arange(num_kv_heads)[:, None].expand(case.value_cache.shape))
    out = case.run(backend)
    expected = torch.arange(num_heads, device=out.device) // (num_heads // num_kv_heads)
    assert (out == expected[:, None]).all()


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=dtype_name)
def test_long_contexts_and_large_heads(backend: Backend, dtype: torch.dtype) -> None:
    case = build_case(
        [1500, 700, 64, 1],
        [70, 1, 64, 1],
        device=backend.device,
        num_heads=8,
        num_kv_heads=1,
        head_dim=128,
        block_size=16,
        dtype=dtype,
    )
    check_attention(backend, case)


@pytest.mark.parametrize("context_len", [12_000, 16_000, 40_000, 131_072])
def test_shared_memory_grows_with_max_len(backend: Backend, context_len: int) -> None:
    case = build_case(
        [context_len, 3], device=backend.device, num_heads=1, num_kv_heads=1, head_dim=8, block_size=16
    )
    check_attention(backend, case, max_query_len=1_000_000)
    check_attention(backend, case, split_size=512)


@pytest.mark.parametrize("head_dim", [16, 32])
def test_grid_dim_65535_silent(backend: Backend, head_dim: int) -> None:
    num_seqs = 65_537
    empty = {"device": backend.device}
    cache = torch.arange(1.0, 6.0, **empty)[:, None, None, None].expand(5, 1, 1, head_dim).contiguous()
    tables = (torch.arange(num_seqs, **empty) % 5).to(torch.int32)[:, None]
    lens = torch.ones(num_seqs, dtype=torch.int32, **empty)
    out = poisoned(num_seqs, 1, head_dim, dtype=torch.float32, device=backend.device)
    query = torch.ones(num_seqs, 1, head_dim, **empty)
    backend.ops.paged_attention(query, tables, cache, cache, lens, out=out)
    assert (out[:, 0] == tables + 1).all()


def test_grid_y_65535(backend: Backend) -> None:
    num_seqs = 70_000
    empty = {"device": backend.device}
    query_lens = 1 + torch.arange(num_seqs) % 2
    query_start_loc = torch.cat([torch.zeros(1), query_lens.cumsum(0)]).to(torch.int32).to(backend.device)
    num_tokens = int(query_start_loc[-1])
    values = torch.tensor([1.0, 3.0], **empty)[None, :, None, None].expand(1, 2, 1, 8).contiguous()
    out = backend.ops.paged_attention(
        torch.ones(num_tokens, 1, 8, **empty),
        torch.zeros(num_seqs, 1, dtype=torch.int32, **empty),
        torch.zeros(1, 2, 1, 8, **empty),
        values,
        torch.full((num_seqs,), 2, dtype=torch.int32, **empty),
        query_start_loc=query_start_loc,
        max_query_len=2,
    )
    expected = torch.full((num_tokens,), 2.0, **empty)  # the last query sees both keys
    expected[query_start_loc[:-1][query_lens.to(backend.device) == 2].long()] = 1.0
    assert (out == expected[:, None, None]).all()


@pytest.mark.parametrize("cache_dtype", QUANTIZED_DTYPES, ids=dtype_name)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=dtype_name)
def test_varlen_paged_split_combo(backend: Backend, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    for query_lens, num_kv_heads in (([1, 5, 129, 2], 4), ([4, 4, 4], 1)):
        case = build_case(
            [length + 61 for length in query_lens],
            query_lens,
            device=backend.device,
            num_kv_heads=num_kv_heads,
            block_size=16,
            dtype=dtype,
            cache_dtype=cache_dtype,
        )
        for split_size in (None, 1_000, 64, 48):
            check_attention(backend, case, split_size=split_size)
