"""paged_attention: quantised caches, their scales, and offsets beyond 32 bits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import (
    FLOAT8_DTYPES,
    FLOAT_DTYPES,
    HUGE_BLOCKS,
    QUANTIZED_DTYPES,
    Backend,
    assert_same_bits,
    build_case,
    check_attention,
    dtype_name,
    huge_cache,
    sparse_zeros,
)

from pagedkv import reference

OPERATORS = ("paged_attention",)


@pytest.mark.parametrize("split_size", [None, 2, 64])
@pytest.mark.parametrize("query_lens", [None, [1], [3]], ids=["decode", "prefill 1", "prefill 3"])
@pytest.mark.parametrize("cache_dtype", QUANTIZED_DTYPES, ids=dtype_name)
def test_scales_ignored_on_one_path(
    backend: Backend, cache_dtype: torch.dtype, query_lens: list[int] | None, split_size: int | None
) -> None:
    # K is stored as K / 0.25 and V as V / 0.5, so V = 1 must come out as 1 and K shows in lse.
    case = build_case(
        [11], query_lens, device=backend.device, cache_dtype=cache_dtype, k_scale=0.25, v_scale=0.5
    )
    for entry in case.block_tables[0, :3].tolist():
        reference.as_bytes(case.value_cache)[entry] = reference.as_bytes(
            torch.tensor([2.0]).to(cache_dtype)
        ).to(backend.device)
        reference.as_bytes(case.key_cache)[entry] = reference.as_bytes(
            torch.tensor([12.0]).to(cache_dtype)
        ).to(backend.device)
    case.query.fill_(0.5)
    out, lse = case.run(backend, split_size=split_size, return_lse=True)
    torch.testing.assert_close(out, torch.ones_like(out), rtol=1e-6, atol=0)
    score = 16 * 0.5 * 3.0 / 4.0  # head_dim * query * key / sqrt(head_dim)
    assert lse[-1].tolist() == pytest.approx([score + math.log(11)] * 4, rel=1e-6)


@pytest.mark.parametrize("query_lens", [None, [1, 1, 40]], ids=["decode", "prefill"])
@pytest.mark.parametrize("cache_dtype", QUANTIZED_DTYPES, ids=dtype_name)
@pytest.mark.parametrize("magnitude", [1e-30, 1e-7, 1e5, 1e30])
def test_bfloat16_query_of_any_magnitude(
    backend: Backend, magnitude: float, cache_dtype: torch.dtype, query_lens: list[int] | None
) -> None:
    """Also where it goes through float16, which has fewer exponents; zeros and a small row beside it."""
    case = build_case(
        [70, 9, 40],
        query_lens,
        dtype=torch.bfloat16,
        device=backend.device,
        cache_dtype=cache_dtype,
        k_scale=0.05,
        v_scale=0.3,
        softmax_scale=0.25 / magnitude,
    )
    case.query.mul_(magnitude)
    case.query[0, 0].fill_(0.0)
    case.query[0, 1].mul_(1e-3)
    check_attention(backend, case)


@pytest.mark.parametrize("form", ["float", "per head", "one float, one per head"])
@pytest.mark.parametrize("cache_dtype", QUANTIZED_DTYPES, ids=dtype_name)
def test_scale_forms(backend: Backend, cache_dtype: torch.dtype, form: str) -> None:
    per_head = torch.tensor([0.05, 0.3], device=backend.device)
    k_scale, v_scale = {
        "float": (0.05, 0.3),
        "per head": (per_head, per_head.flip(0)),
        "one float, one per head": (0.1, per_head),
    }[form]
    settings: dict[str, Any] = {"cache_dtype": cache_dtype, "k_scale": k_scale, "v_scale": v_scale}
    check_attention(backend, build_case([9, 30], [2, 1], device=backend.device, **settings))
    if form == "float":  # a float is the same as that value for every head
        settings |= {"k_scale": torch.full((2,), 0.05), "v_scale": torch.full((2,), 0.3)}
        settings = {
            k: v.to(backend.device) if isinstance(v, torch.Tensor) else v for k, v in settings.items()
        }
        tensors = build_case([9, 30], [2, 1], device=backend.device, **settings)
        floats = build_case(
            [9, 30], [2, 1], device=backend.device, cache_dtype=cache_dtype, k_scale=0.05, v_scale=0.3
        )
        assert_same_bits(tensors.run(backend), floats.run(backend))


@pytest.mark.parametrize("cache_dtype", FLOAT8_DTYPES, ids=dtype_name)
def test_float8_scales_default_to_one(backend: Backend, cache_dtype: torch.dtype) -> None:
    settings: dict[str, Any] = {"cache_dtype": cache_dtype, "device": backend.device}
    without = build_case([9, 30], k_scale=None, v_scale=None, **settings)
    out = check_attention(backend, without)
    assert_same_bits(without.run(backend, k_scale=1.0, v_scale=1.0), out)
    check_attention(backend, without, k_scale=0.5)
    check_attention(backend, without, v_scale=0.5)


@pytest.mark.parametrize("cache_dtype", FLOAT8_DTYPES, ids=dtype_name)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=dtype_name)
def test_fp8_prefix_path(backend: Backend, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    case = build_case([40], [8], device=backend.device, block_size=16, dtype=dtype, cache_dtype=cache_dtype)
    check_attention(backend, case)
    arguments = [
        case.query,
        case.block_tables,
        case.key_cache.view(torch.uint8),
        case.value_cache.view(torch.uint8),
    ]
    with pytest.raises(TypeError, match=r"key_cache.*(uint8|Byte|unsigned char).*float8_e4m3fn"):
        backend.ops.paged_attention(*arguments, case.context_lens, **case.keywords)


@pytest.mark.parametrize("cache_dtype", FLOAT8_DTYPES, ids=dtype_name)
def test_every_float8_value_is_read_exactly(backend: Backend, cache_dtype: torch.dtype) -> None:
    # One sequence a code, of one token: the output is the value itself.
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(cache_dtype).float()
    cache = codes.view(256, 1, 1, 1).expand(256, 1, 1, 8).contiguous().to(backend.device).view(cache_dtype)
    out = backend.ops.paged_attention(
        torch.zeros(256, 1, 8, device=backend.device),
        torch.arange(256, dtype=torch.int32, device=backend.device)[:, None],
        torch.zeros_like(cache.view(torch.uint8)).view(cache_dtype),
        cache,
        torch.ones(256, dtype=torch.int32, device=backend.device),
    )
    torch.testing.assert_close(out[:, 0, 0].cpu(), values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("head_dim", [*range(8, 72, 8), 80, 96, 120, 128, 200, 256])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=dtype_name)
def test_int8_avx2_path(backend: Backend, dtype: torch.dtype, head_dim: int) -> None:
    # Head dims around every vector width, with the extreme codes -127 and 127 and the never-written -128.
    case = build_case(
        [1, 15, 33, 66], device=backend.device, head_dim=head_dim, dtype=dtype, cache_dtype=torch.int8
    )
    check_attention(backend, case)
    generator = torch.Generator().manual_seed(head_dim)
    for cache in case.arguments[2:4]:
        cache.copy_(torch.randint(-128, 128, cache.shape, generator=generator, dtype=torch.int8))
    check_attention(backend, case, k_scale=0.01, v_scale=0.25)


@pytest.mark.parametrize("head_dim", [8, 16, 24, 40, 48, 80, 112, 120])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float16, torch.int8], ids=dtype_name)
def test_head_size_vector_width_cpu(backend: Backend, cache_dtype: torch.dtype, head_dim: int) -> None:
    # Every operand ends where its allocation ends: an overrun is a fault under AddressSanitizer.
    dtype = torch.float32 if cache_dtype == torch.int8 else cache_dtype
    case = build_case(
        [8],
        device=backend.device,
        head_dim=head_dim,
        dtype=dtype,
        cache_dtype=cache_dtype,
        extra_table_entries=0,
    )
    last_block = case.key_cache.shape[0] - 1
    for cache in case.arguments[2:4]:
        cache[last_block - 1 :] = cache[case.block_tables[0].long()].clone()
    case.block_tables.copy_(backend.tensor([[last_block - 1, last_block]]))
    check_attention(backend, case)


# ------------------------------------------------------------------------------ offsets past 32 bits


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [(torch.float32, torch.int8), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)],
    ids=dtype_name,
)
@pytest.mark.parametrize("query_lens", [None, [2] * len(HUGE_BLOCKS)], ids=["decode", "prefill"])
def test_int32_offset_overflow(
    backend: Backend, dtype: torch.dtype, cache_dtype: torch.dtype, query_lens: list[int] | None
) -> None:
    cache = huge_cache(cache_dtype, backend.device)
    scale = 0.25 if cache_dtype == torch.int8 else 1.0
    wrapped = cache.as_strided((128,), (1,), 0)  # where a 32-bit offset of block 2048 leads
    wrapped.fill_(-1 / scale)
    for block in HUGE_BLOCKS:
        cache[block].fill_(0.75 / scale)
    num_seqs = len(HUGE_BLOCKS)
    options: dict[str, Any] = {"k_scale": scale, "v_scale": scale} if cache_dtype == torch.int8 else {}
    if query_lens is not None:
        options["query_start_loc"] = backend.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()])
    num_tokens = sum(query_lens) if query_lens else num_seqs
    out, lse = backend.ops.paged_attention(
        torch.ones(num_tokens, 1, 8, dtype=dtype, device=backend.device),
        backend.tensor(HUGE_BLOCKS)[:, None],
        cache,
        cache,
        backend.tensor([16] * num_seqs),
        softmax_scale=1.0,
        return_lse=True,
        **options,
    )
    assert (out == 0.75).all()
    expected = 6.0 + math.log(16)  # 8 * 0.75, sixteen times
    last_rows = lse[:, 0] if query_lens is None else lse[1::2, 0]
    assert last_rows.tolist() == pytest.approx([expected] * num_seqs, rel=1e-6)


@pytest.mark.parametrize("context_len", [1, 16, 17])
def test_uint32_page_offset_wrap(backend: Backend, context_len: int) -> None:
    # Page ids around a million, 16384 elements apart: 2**34 elements into the cache.
    page_stride, high = 16_384, 1_000_003
    storage = sparse_zeros((high + 3) * page_stride, torch.int8, backend.device)
    cache = storage.as_strided((high + 3, 16, 1, 8), (page_stride, 8, 8, 1))
    generator = torch.Generator().manual_seed(context_len)
    data = torch.randint(-127, 128, (2, 16, 1, 8), generator=generator, dtype=torch.int8).to(backend.device)
    cache[[2, 1]] = data
    cache[[high, high + 2]] = data
    query = torch.randn(1, 1, 8, generator=generator).to(backend.device)
    outs = [
        backend.ops.paged_attention(
            query,
            backend.tensor([table]),
            cache,
            cache,
            backend.tensor([context_len]),
            k_scale=0.01,
            v_scale=0.02,
        )
        for table in ([high, high + 2], [2, 1])
    ]
    assert_same_bits(outs[0], outs[1])
    assert outs[0].abs().max() > 0
