"""paged_attention: shapes that reach every way in which the CUDA back-end cuts the work into tiles and parts.

Few rows a sequence go to one kernel, many (a prefill, or a large group of heads) to another; and where there
are few of either, several CTAs share a row's keys.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import (
    FLOAT8_DTYPES,
    QUANTIZED_DTYPES,
    Backend,
    assert_same_bits,
    build_case,
    check_attention,
    dtype_name,
)

OPERATORS = ("paged_attention",)

# Every pair that tensor cores serve.
PAIRS = [
    (dtype, cache)
    for dtype in (torch.bfloat16, torch.float16)
    for cache in (dtype, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
]

# A long prefill over past tokens, one without a past, a decode step, sequences without a query, a short one.
MIXED_CONTEXT_LENS = [610, 40, 333, 0, 9, 75]
MIXED_QUERY_LENS = [150, 40, 1, 0, 0, 30]

MIXED_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "non_causal": {"causal": False},
    "window": {"window": 70},
    "window_non_causal": {"window": 40, "causal": False},
    "softcap_alibi_sinks": {"softcap": 2.0, "alibi_slopes": "slopes", "sinks": "logits"},
    "kv_starts": {"kv_starts": [130, 0, 64, 0, 3, 70]},
    "tree": {"tree_mask": "mask"},
    "tree_window": {"tree_mask": "mask", "window": 90},
}


def mixed_options(name: str, num_heads: int, device: torch.device) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(4)
    tensors = {
        "slopes": 2.0 ** -torch.arange(1.0, num_heads + 1).to(device),
        "logits": torch.randn(num_heads, generator=generator).to(device),
        "mask": (torch.rand(sum(MIXED_QUERY_LENS), 80, generator=generator) < 0.6).to(device),
    }
    return {k: tensors[v] if isinstance(v, str) else v for k, v in MIXED_OPTIONS[name].items()}


@pytest.mark.parametrize("options", MIXED_OPTIONS)
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"), [PAIRS[0], (torch.float16, torch.float8_e4m3fn)], ids=dtype_name
)
def test_mixed_batch(backend: Backend, dtype: torch.dtype, cache_dtype: torch.dtype, options: str) -> None:
    case = build_case(
        MIXED_CONTEXT_LENS,
        MIXED_QUERY_LENS,
        device=backend.device,
        head_dim=64,
        block_size=16,
        dtype=dtype,
        cache_dtype=cache_dtype,
        num_padding_rows=3,
        **mixed_options(options, 4, backend.device),
    )
    if "tree_mask" in case.options:
        rows = case.options["tree_mask"]
        case.options["tree_mask"] = torch.cat([rows, rows[:3]])
    check_attention(backend, case)


@pytest.mark.parametrize(("dtype", "cache_dtype"), PAIRS, ids=dtype_name)
@pytest.mark.parametrize(
    ("head_dim", "value_head_dim", "block_size", "layout"),
    [(128, 128, 16, "contiguous"), (72, 120, 7, "padded"), (256, 200, 5, "interleaved"), (40, 16, 32, "hnd")],
)
def test_prefill_of_every_dtype_and_width(
    backend: Backend,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    head_dim: int,
    value_head_dim: int,
    block_size: int,
    layout: str,
) -> None:
    case = build_case(
        [150, 70],
        [90, 3],
        device=backend.device,
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        value_head_dim=value_head_dim,
        block_size=block_size,
        dtype=dtype,
        cache_dtype=cache_dtype,
        layout=layout,
        strided_query=head_dim == 72,
    )
    check_attention(backend, case)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(48, 1), (71, 1), (136, 2)])
@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "head_dim"),
    [
        (torch.bfloat16, torch.bfloat16, 128),
        (torch.float16, torch.float8_e5m2, 64),
        (torch.bfloat16, torch.int8, 256),
    ],
    ids=dtype_name,
)
def test_large_groups(
    backend: Backend,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
) -> None:
    # Contexts that several CTAs share, and some that are too short for it.
    case = build_case(
        [700, 0, 300, 64, 1],
        device=backend.device,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=16,
        dtype=dtype,
        cache_dtype=cache_dtype,
    )
    check_attention(backend, case)


UNEQUAL_LENS = [2300, 1, 0, 900, 64, 65, 255, 256, 0, 1030, 3, 640]


@pytest.mark.parametrize("num_kv_heads", [1, 3, 33])
@pytest.mark.parametrize("window", [None, 700, 10])
def test_unequal_lengths(backend: Backend, num_kv_heads: int, window: int | None) -> None:
    case = build_case(
        UNEQUAL_LENS if num_kv_heads < 33 else UNEQUAL_LENS[3:8],
        device=backend.device,
        num_heads=num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=8,
        block_size=16,
        dtype=torch.bfloat16,
        window=window,
    )
    check_attention(backend, case)
    assert_same_bits(case.run(backend), case.run(backend))


@pytest.mark.parametrize("num_seqs", [33, 200, 300])
def test_many_short_sequences_and_a_long_one(backend: Backend, num_seqs: int) -> None:
    lens = [seq_idx % 5 for seq_idx in range(num_seqs)]
    lens[num_seqs // 3] = 1100
    query_lens = [min(length, 1 + length % 2) for length in lens]
    for rows in (None, query_lens):
        case = build_case(
            lens,
            rows,
            device=backend.device,
            num_heads=2,
            num_kv_heads=1,
            head_dim=8,
            block_size=16,
            dtype=torch.float16,
        )
        check_attention(backend, case, max_query_len=2)


def test_two_prefills_share_the_device(backend: Backend) -> None:
    # So few rows that CTAs share their keys, which lie in one long and one short context.
    case = build_case(
        [1500, 200],
        [70, 5],
        device=backend.device,
        num_heads=1,
        num_kv_heads=1,
        head_dim=32,
        block_size=16,
        dtype=torch.float16,
        sinks=torch.ones(1, device=backend.device),
    )
    check_attention(backend, case)
    check_attention(backend, case, window=300)
    assert_same_bits(case.run(backend), case.run(backend))


@pytest.mark.parametrize("split_size", [None, 64])
@pytest.mark.parametrize("cache_dtype", QUANTIZED_DTYPES, ids=dtype_name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_name)
@pytest.mark.parametrize("num_heads", [8, 256])
def test_every_code_of_an_8_bit_cache(
    backend: Backend,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    num_heads: int,
    split_size: int | None,
) -> None:
    # With one key a row's output is its value, bit for bit, and its lse a single element of the key where the
    # query is a unit vector.
    device = backend.device
    codes = torch.arange(256, device=device).to(torch.uint8).view(cache_dtype).view(1, 1, 1, 256)
    finite = codes.float().nan_to_num(1.0, 2.0, 3.0)
    keys = finite if cache_dtype == torch.int8 else finite.to(cache_dtype)
    first = 256 - num_heads
    query = torch.eye(256, device=device)[None, first:].to(dtype)
    out, lse = backend.ops.paged_attention(
        query,
        torch.zeros(1, 1, dtype=torch.int32, device=device),
        keys.to(cache_dtype),
        codes,
        backend.tensor([1]),
        softmax_scale=1.0,
        k_scale=1.0,
        v_scale=1.0,
        split_size=split_size,
        return_lse=True,
    )
    expected = codes.float().to(dtype).view(1, 1, 256).expand(1, num_heads, 256)
    assert torch.equal(out.isnan(), expected.isnan())
    assert_same_bits(out.nan_to_num() + 0.0, expected.nan_to_num() + 0.0)  # -0 became 0 in a sum
    torch.testing.assert_close(lse[0], finite.view(256)[first:], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [PAIRS[0], PAIRS[4], *[(torch.bfloat16, cache) for cache in FLOAT8_DTYPES]],
    ids=dtype_name,
)
@pytest.mark.parametrize("query_len", [1, 70])
def test_visible_nan_is_not_swallowed(
    backend: Backend, dtype: torch.dtype, cache_dtype: torch.dtype, query_len: int
) -> None:
    # The only key of a warp, a key among others, and a value.
    for token, cache_idx in ((0, 2), (64, 2), (70, 2), (70, 3)):
        case = build_case(
            [71 + query_len],
            [query_len],
            device=backend.device,
            head_dim=64,
            block_size=16,
            dtype=dtype,
            cache_dtype=cache_dtype,
            k_scale=1.0 if cache_dtype != dtype else None,
            v_scale=1.0 if cache_dtype != dtype else None,
            kv_starts=[token],
        )
        block = int(case.block_tables[0, token // 16])
        case.arguments[cache_idx][block, token % 16, 1, 3] = torch.nan
        out, lse = case.run(backend, return_lse=True)
        hit = torch.zeros_like(out, dtype=torch.bool)
        hit[:, 2:, ... if cache_idx == 2 else 3] = True
        assert torch.equal(out.isnan(), hit)
        assert torch.equal(lse.isnan(), hit[..., 0] & (cache_idx == 2))


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"), [PAIRS[0], (torch.float16, torch.float8_e4m3fn)], ids=dtype_name
)
@pytest.mark.parametrize("query_len", [3, 70])
def test_key_that_a_tree_hides_from_every_row(
    backend: Backend, dtype: torch.dtype, cache_dtype: torch.dtype, query_len: int
) -> None:
    max_tree, hidden = 80, (0, 13, 79)
    mask = torch.rand(query_len, max_tree, generator=torch.Generator().manual_seed(2)) < 0.7
    mask[:, hidden] = False
    case = build_case(
        [150],
        [query_len],
        device=backend.device,
        head_dim=40,
        block_size=16,
        dtype=dtype,
        cache_dtype=cache_dtype,
        tree_mask=mask.to(backend.device),
    )
    results = []
    for filler in (0.0, torch.nan):
        for column in hidden:
            token = 150 - max_tree + column
            for cache in case.arguments[2:4]:
                cache[int(case.block_tables[0, token // 16]), token % 16] = filler
        results.append(case.run(backend, split_size=64 if query_len == 3 else None))
    assert results[1].isfinite().all()
    assert_same_bits(results[1], results[0])


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
@pytest.mark.parametrize("cache_dtype", [torch.float16, torch.int8], ids=dtype_name)
def test_decode_and_prefill_rows_of_long_heads(
    backend: Backend, cache_dtype: torch.dtype, head_dim: int
) -> None:
    """The longer the heads, the more orders in which products could be summed."""
    query_len, context_len = 20, 130
    case = build_case(
        [context_len],
        [query_len],
        device=backend.device,
        num_heads=8,
        head_dim=head_dim,
        block_size=16,
        dtype=torch.float16,
        cache_dtype=cache_dtype,
    )
    out, lse = case.run(backend, split_size=64, return_lse=True)
    for row in range(query_len):
        decode, decode_lse = backend.ops.paged_attention(
            case.query[row : row + 1],
            *case.arguments[1:4],
            backend.tensor([context_len - query_len + row + 1]),
            split_size=64,
            return_lse=True,
            **case.options,
        )
        assert_same_bits(decode, out[row : row + 1], f"row {row}")
        assert_same_bits(decode_lse, lse[row : row + 1], f"lse of row {row}")


@pytest.mark.parametrize("softcap", [20.0, 1e3, 1e6, 1e30])
@pytest.mark.parametrize("query_lens", [None, [40]], ids=["decode", "prefill"])
def test_large_softcap_changes_little(backend: Backend, query_lens: list[int] | None, softcap: float) -> None:
    case = build_case(
        [90], query_lens, device=backend.device, head_dim=64, block_size=16, dtype=torch.float16
    )
    check_attention(backend, case, softcap=softcap)


@pytest.mark.parametrize(("dtype", "cache_dtype"), PAIRS[:2], ids=dtype_name)
def test_rows_before_kv_starts(backend: Backend, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    """Rows 0 to 71 see nothing; what keys before 102 hold must not reach row 72, which shares their tile."""
    case = build_case(
        [230],
        [200],
        device=backend.device,
        num_heads=2,
        block_size=16,
        dtype=dtype,
        cache_dtype=cache_dtype,
        kv_starts=[102],
    )
    check_attention(backend, case)
    check_attention(backend, case, split_size=64)
