"""gather_kv: dense rows out of scattered blocks, bit for bit or dequantised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    CACHE_DTYPES,
    FLOAT8_DTYPES,
    FLOAT_DTYPES,
    HUGE_BLOCKS,
    LAYOUTS,
    QUANTIZED_DTYPES,
    UNUSED_BLOCK_IDS,
    Backend,
    Case,
    assert_same_bits,
    build_case,
    dtype_name,
    huge_cache,
    sparse_zeros,
)

import pagedkv
from pagedkv import reference

OPERATORS = ("gather_kv",)


def gather_case(backend: Backend, context_lens: list[int], **settings: Any) -> Case:
    """A poisoned cache; the queries that `build_case` makes are not used."""
    cache_dtype = settings.pop("cache_dtype", torch.float32)
    dtype = cache_dtype if cache_dtype in FLOAT_DTYPES else torch.float32
    return build_case(context_lens, device=backend.device, dtype=dtype, cache_dtype=cache_dtype, **settings)


def gather(backend: Backend, case: Case, **options: Any) -> Any:
    return backend.ops.gather_kv(
        case.key_cache, case.value_cache, case.block_tables, case.context_lens, **{**case.options, **options}
    )


def check_gather(backend: Backend, case: Case, **options: Any) -> None:
    """Compare with the reference bitwise, and with the rows that the case was built from."""
    arguments = case.key_cache, case.value_cache, case.block_tables, case.context_lens
    expected = reference.gather_kv(*arguments, **{**case.options, **options})
    total = expected[0].shape[0]
    for total_tokens in (None, total):
        for actual, right in zip(
            gather(backend, case, total_tokens=total_tokens, **options), expected, strict=True
        ):
            assert_same_bits(actual, right)
            assert actual.is_contiguous()
    starts = case.options.get("kv_starts")
    starts = [0] * len(case.keys) if starts is None else starts.tolist()
    for right, dense in zip(expected, (case.keys, case.values), strict=True):
        rows = torch.cat([x[start:] for x, start in zip(dense, starts, strict=True)])
        torch.testing.assert_close(right.float(), rows, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES, ids=dtype_name)
def test_every_dtype_and_layout(backend: Backend, cache_dtype: torch.dtype, layout: str) -> None:
    case = gather_case(
        backend, [9, 1, 0, 17, 4], cache_dtype=cache_dtype, layout=layout, head_dim=24, value_head_dim=40
    )
    check_gather(backend, case)
    for dtype in FLOAT_DTYPES:
        check_gather(backend, case, dtype=dtype)


def test_result_dtype(backend: Backend) -> None:
    for cache_dtype in CACHE_DTYPES:
        case = gather_case(backend, [5], cache_dtype=cache_dtype)
        expected = cache_dtype if cache_dtype in FLOAT_DTYPES else torch.float32
        assert gather(backend, case)[0].dtype == gather(backend, case)[1].dtype == expected


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES, ids=dtype_name)
def test_kv_starts(backend: Backend, cache_dtype: torch.dtype) -> None:
    # What lies before a start is poison, and the entries of blocks wholly before it are garbage.
    case = gather_case(backend, [9, 5, 30, 8], kv_starts=[4, 0, 11, 8], cache_dtype=cache_dtype)
    assert int(case.block_tables[2, 0]) in UNUSED_BLOCK_IDS
    check_gather(backend, case)
    assert gather(backend, case)[0].shape[0] == 5 + 5 + 19 + 0


def test_kv_start_beyond_the_context_is_empty(backend: Backend) -> None:
    case = gather_case(backend, [9, 5])
    for starts in ([20, 0], [9, 0]):
        key, value = gather(backend, case, kv_starts=backend.tensor(starts))
        assert_same_bits(key, case.keys[1])
        assert_same_bits(value, case.values[1])


@pytest.mark.parametrize("block_size", [1, 3, 7, 16, 100, 544])
def test_block_sizes(backend: Backend, block_size: int) -> None:
    check_gather(backend, gather_case(backend, [1, block_size, block_size + 1, 70], block_size=block_size))


@pytest.mark.parametrize(
    ("head_dim", "value_head_dim"), [(1, 1), (2, 3), (36, 20), (50, 66), (192, 128), (576, 512), (7, 128)]
)
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES, ids=dtype_name)
def test_any_head_dim(backend: Backend, cache_dtype: torch.dtype, head_dim: int, value_head_dim: int) -> None:
    for layout in ("contiguous", "padded"):
        case = gather_case(
            backend,
            [6, 11],
            cache_dtype=cache_dtype,
            head_dim=head_dim,
            value_head_dim=value_head_dim,
            layout=layout,
            num_kv_heads=3,
            num_heads=3,
        )
        check_gather(backend, case)


@pytest.mark.parametrize("filler", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2], ids=dtype_name)
def test_nan_in_unused_tail_v(backend: Backend, cache_dtype: torch.dtype, filler: float) -> None:
    for context_len in (1, 15, 16, 17, 43):
        case = gather_case(backend, [context_len], cache_dtype=cache_dtype, block_size=16)
        key, value = gather(backend, case)
        assert key.isfinite().all()
        assert value.isfinite().all()
        assert_same_bits(key.float(), case.keys[0])
        assert_same_bits(value.float(), case.values[0])


@pytest.mark.parametrize("cache_dtype", FLOAT_DTYPES, ids=dtype_name)
def test_float_caches_keep_every_bit(backend: Backend, cache_dtype: torch.dtype) -> None:
    case = gather_case(backend, [16], cache_dtype=cache_dtype, block_size=16)
    integers = reference.as_bytes(case.key_cache)
    info = torch.iinfo(integers.dtype)
    integers.random_(info.min, info.max, generator=torch.Generator(backend.device).manual_seed(0))
    key, _ = gather(backend, case)
    assert_same_bits(key, case.key_cache[int(case.block_tables[0, 0])])


@pytest.mark.parametrize("cache_dtype", FLOAT8_DTYPES, ids=dtype_name)
def test_every_float8_value(backend: Backend, cache_dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=backend.device)
    cache = codes.view(1, 256, 1, 1).view(cache_dtype)
    for scale in (1.0, 0.3):
        key, value = backend.ops.gather_kv(
            cache, cache, backend.tensor([[0]]), backend.tensor([256]), k_scale=scale, v_scale=0.5
        )
        expected = codes.view(cache_dtype).float()
        for actual, factor in ((key, scale), (value, 0.5)):
            torch.testing.assert_close(
                actual.flatten(), expected * torch.tensor(factor), rtol=0, atol=0, equal_nan=True
            )


@pytest.mark.parametrize("cache_dtype", QUANTIZED_DTYPES, ids=dtype_name)
def test_scales_ignored_on_one_path(backend: Backend, cache_dtype: torch.dtype) -> None:
    settings: dict[str, Any] = {"cache_dtype": cache_dtype, "k_scale": 0.25, "v_scale": 0.5}
    case = gather_case(backend, [3], **settings)
    for cache in case.arguments[2:4]:
        reference.as_bytes(cache)[int(case.block_tables[0, 0])] = reference.as_bytes(
            torch.tensor([2.0]).to(cache_dtype)
        ).to(backend.device)
    key, value = gather(backend, case)
    assert (key == 0.5).all()
    assert (value == 1.0).all()
    per_head = torch.tensor([0.5, 2.0], device=backend.device)
    key, value = gather(backend, case, k_scale=per_head, v_scale=per_head.flip(0))
    assert (key == torch.tensor([1.0, 4.0], device=backend.device)[:, None]).all()
    assert (value == torch.tensor([4.0, 1.0], device=backend.device)[:, None]).all()


def test_total_tokens(backend: Backend) -> None:
    case = gather_case(backend, [9, 5], kv_starts=[2, 0])
    for wrong in (0, 11, 13, -1):
        with backend.index_checks(), pytest.raises(ValueError, match=rf"total_tokens.*{wrong}"):
            gather(backend, case, total_tokens=wrong)
    if not backend.checks_indices:  # a wrong count never makes the kernel write past its output
        key, _ = gather(backend, case, total_tokens=8)
        assert key.shape[0] == 8
        assert_same_bits(key, torch.cat([case.keys[0][2:], case.keys[1][:1]]))
        key, _ = gather(backend, case, total_tokens=20)
        assert_same_bits(key[:12], torch.cat([case.keys[0][2:], case.keys[1]]))


def test_empty_batches(backend: Backend) -> None:
    case = gather_case(backend, [0, 0])
    for total_tokens in (None, 0):
        key, value = gather(backend, case, total_tokens=total_tokens)
        assert key.shape == value.shape == (0, 2, 16)
    empty = backend.tensor([])
    key, value = backend.ops.gather_kv(case.key_cache, case.value_cache, empty.view(0, 3), empty)
    assert key.shape == value.shape == (0, 2, 16)


def test_many_short_and_one_long_sequence(backend: Backend) -> None:
    context_lens = [1, 0, 2] * 100 + [3000] + [5] * 100
    check_gather(backend, gather_case(backend, context_lens, head_dim=8, num_kv_heads=1, block_size=16))


# ------------------------------------------------------------------------------------------- indices


def test_invalid_padding_block_ids(backend: Backend) -> None:
    case = gather_case(backend, [20], block_size=16)
    expected = gather(backend, case)
    for bad in UNUSED_BLOCK_IDS:
        case.block_tables[0, 2:] = bad
        for actual, right in zip(gather(backend, case), expected, strict=True):
            assert_same_bits(actual, right)


@pytest.mark.parametrize("bad", [-1, 99, *UNUSED_BLOCK_IDS])
def test_needed_block_outside_the_pool(backend: Backend, bad: int) -> None:
    case = gather_case(backend, [20, 20], block_size=16)
    case.block_tables[0, 1] = bad
    with backend.index_checks(), pytest.raises(IndexError, match=rf"(?s)block_tables\[0, 1\].*{bad}"):
        gather(backend, case)
    if not backend.checks_indices:  # the rows of valid blocks are right; nothing else is touched
        for actual, dense in zip(gather(backend, case), (case.keys, case.values), strict=True):
            assert_same_bits(actual[:16], dense[0][:16])
            assert_same_bits(actual[20:], dense[1])


def test_seq_len_exceeds_table(backend: Backend) -> None:
    case = gather_case(backend, [64, 64], block_size=16, extra_table_entries=0)
    lens = backend.tensor([64, 65])
    arguments = case.key_cache, case.value_cache, case.block_tables, lens
    with backend.index_checks(), pytest.raises(IndexError, match=r"(?s)context_lens\[1\].*65.*64"):
        backend.ops.gather_kv(*arguments)
    if not backend.checks_indices:
        key, _ = backend.ops.gather_kv(*arguments)
        assert_same_bits(key[:128], torch.cat(case.keys))


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.bfloat16], ids=dtype_name)
def test_int32_offset_overflow(backend: Backend, cache_dtype: torch.dtype) -> None:
    cache = huge_cache(cache_dtype, backend.device)
    for number, block in enumerate(HUGE_BLOCKS):
        cache[block].fill_(number + 1)
    scales = {"k_scale": 1.0, "v_scale": 1.0} if cache_dtype == torch.int8 else {}
    key, value = backend.ops.gather_kv(
        cache, cache, backend.tensor([HUGE_BLOCKS]), backend.tensor([16 * len(HUGE_BLOCKS)]), **scales
    )
    expected = torch.arange(1, len(HUGE_BLOCKS) + 1, device=backend.device).repeat_interleave(16)
    assert (key == expected[:, None, None]).all()
    assert (value == expected[:, None, None]).all()


def test_uint32_page_offset_wrap(backend: Backend) -> None:
    page_stride, block = 16_384, 1_000_003
    cache = sparse_zeros((block + 1) * page_stride, torch.float8_e5m2, backend.device).as_strided(
        (block + 1, 16, 1, 8), (page_stride, 8, 8, 1)
    )
    reference.as_bytes(cache)[block] = 0x3C  # 1.0
    for context_len in (1, 16):
        key, value = backend.ops.gather_kv(
            cache, cache, backend.tensor([[block]]), backend.tensor([context_len])
        )
        assert (key == 1).all()
        assert (value == 1).all()
        assert key.shape[0] == context_len


# -------------------------------------------------------------------------------------------- errors

Call = dict[str, Any]
MISTAKES: dict[str, tuple[type[Exception], str, Callable[[Call], Call]]] = {
    "cache rank": (ValueError, "key_cache.*num_blocks", lambda a: {"key_cache": a["key_cache"][0]}),
    "cache strided": (
        ValueError,
        "key_cache.*contiguous",
        lambda a: {"key_cache": a["key_cache"].transpose(1, 3).contiguous().transpose(1, 3)},
    ),
    "cache dtype": (
        TypeError,
        "key_cache.*float8_e4m3fn",
        lambda a: {"key_cache": a["key_cache"].double(), "value_cache": a["value_cache"].double()},
    ),
    "caches differ": (
        TypeError,
        "value_cache.*key_cache",
        lambda a: {"value_cache": a["value_cache"].half()},
    ),
    "pools differ": (ValueError, "value_cache.*num_blocks", lambda a: {"value_cache": a["value_cache"][1:]}),
    "tables dtype": (
        TypeError,
        "(?i)block_tables.*int",
        lambda a: {"block_tables": a["block_tables"].long()},
    ),
    "tables rank": (ValueError, "block_tables.*num_seqs", lambda a: {"block_tables": a["block_tables"][0]}),
    "lens dtype": (TypeError, "(?i)context_lens.*int", lambda a: {"context_lens": a["context_lens"].long()}),
    "lens length": (ValueError, "context_lens.*num_seqs", lambda a: {"context_lens": a["context_lens"][1:]}),
    "starts dtype": (TypeError, "(?i)kv_starts.*int", lambda a: {"kv_starts": a["context_lens"].long()}),
    "starts length": (ValueError, "kv_starts.*num_seqs", lambda a: {"kv_starts": a["context_lens"][1:]}),
    "result dtype": (TypeError, "dtype.*float16, bfloat16, float32", lambda a: {"dtype": torch.int8}),
    "scale on float": (ValueError, "k_scale", lambda a: {"k_scale": 1.0}),
    "int8 needs scales": (
        ValueError,
        "k_scale",
        lambda a: {
            "key_cache": a["key_cache"].to(torch.int8),
            "value_cache": a["value_cache"].to(torch.int8),
        },
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_errors(backend: Backend, mistake: str) -> None:
    exception, message, change = MISTAKES[mistake]
    case = build_case([9, 4], device=backend.device)
    arguments: Call = {
        "key_cache": case.key_cache.nan_to_num(0),
        "value_cache": case.value_cache.nan_to_num(0),
        "block_tables": case.block_tables,
        "context_lens": case.context_lens,
    }
    arguments |= change(arguments)
    with pytest.raises(exception, match=f"(?s){message}"):
        backend.ops.gather_kv(**arguments)


@pytest.mark.parametrize("name", ["key_cache", "value_cache"])
def test_inference_only(backend: Backend, name: str) -> None:
    case = build_case([9, 4], device=backend.device)
    arguments = {"key_cache": case.key_cache, "value_cache": case.value_cache}
    arguments[name].requires_grad_()
    with pytest.raises(RuntimeError, match=rf"(?s){name}.*torch\.no_grad\(\)"):
        backend.ops.gather_kv(**arguments, block_tables=case.block_tables, context_lens=case.context_lens)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", [128, 120])
def test_more_than_the_cpus_caches_hold(layout: str, head_dim: int) -> None:
    """From 8 MiB on other instructions write, a cache line at a time; rows of 120 are not whole lines."""
    backend = Backend("cpu", torch.device("cpu"), pagedkv.ops)
    case = gather_case(
        backend, [1500, 0, 1003], layout=layout, num_kv_heads=4, head_dim=head_dim, value_head_dim=128
    )
    check_gather(backend, case)
