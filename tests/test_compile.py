"""torch.compile(fullgraph=True): equal to eager, and no copy of a cache in what inductor generates."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import FLOAT8_DTYPES, assert_same_bits, build_case, dtype_name
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import pagedkv

COMPILERS = ("eager", "aot_eager", "inductor")
NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM = 19, 4, 2, 16  # 19 blocks: a shape that nothing else here has
TABLES = [[3, 17, 0], [5, 1, 18]]
SLOTS = [3 * 4 + 1, 5 * 4 + 2, 17 * 4]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def caches(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    key, value = (torch.randn(shape, generator=generator) for _ in range(2))
    return key.to(dtype), value.to(dtype)


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "query": torch.randn(2, 4, HEAD_DIM, generator=generator),
        "rows": torch.randn(3, NUM_KV_HEADS, HEAD_DIM, generator=generator),
        "slots": torch.tensor(SLOTS),
        "tables": torch.tensor(TABLES, dtype=torch.int32),
        "lens": torch.tensor([6, 11], dtype=torch.int32),
    }


def check_compiled(
    function: Callable[..., Any], make_arguments: Callable[[], tuple[Any, ...]], compiler: str
) -> None:
    """Results and mutated arguments of the compiled function equal those of the plain one, twice."""
    compiled = torch.compile(function, fullgraph=True, backend=compiler)
    eager_arguments, arguments = make_arguments(), make_arguments()
    for _ in range(2):  # the second call runs the compiled code on caches that the first one wrote
        expected, actual = function(*eager_arguments), compiled(*arguments)
        flat_expected = expected if isinstance(expected, tuple) else (expected,)
        flat_actual = actual if isinstance(actual, tuple) else (actual,)
        for x, y in zip((*flat_actual, *arguments), (*flat_expected, *eager_arguments), strict=True):
            if isinstance(y, Tensor):
                assert_same_bits(x, y)


def write_then_read(
    key_cache: Tensor,
    value_cache: Tensor,
    query: Tensor,
    rows: Tensor,
    slots: Tensor,
    tables: Tensor,
    lens: Tensor,
) -> Tensor:
    pagedkv.reshape_and_cache(rows * 2, rows + 1, key_cache, value_cache, slots)
    return pagedkv.paged_attention(query * 0.5, tables, key_cache, value_cache, lens, window=9) + 1


def write_twice_then_read(
    key_cache: Tensor,
    value_cache: Tensor,
    query: Tensor,
    rows: Tensor,
    slots: Tensor,
    tables: Tensor,
    lens: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    pagedkv.reshape_and_cache(rows, rows, key_cache, value_cache, slots)
    first, _ = pagedkv.paged_attention(query, tables, key_cache, value_cache, lens, return_lse=True)
    pagedkv.reshape_and_cache(-rows, rows * 3, key_cache, value_cache, slots)
    second, lse = pagedkv.paged_attention(query, tables, key_cache, value_cache, lens, return_lse=True)
    return first, second, lse


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("function", [write_then_read, write_twice_then_read])
def test_mutable_arg_not_declared(function: Callable[..., Any], compiler: str) -> None:
    check_compiled(function, lambda: (*caches(), *inputs().values()), compiler)


@pytest.mark.parametrize("cache_dtype", [*FLOAT8_DTYPES, torch.int8], ids=dtype_name)
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_quantised_caches(cache_dtype: torch.dtype, compiler: str) -> None:
    def function(key_cache: Tensor, value_cache: Tensor, scale: Tensor, *rest: Tensor) -> Tensor:
        query, rows, slots, tables, lens = rest
        scales = {"k_scale": scale, "v_scale": 0.25}
        pagedkv.reshape_and_cache(rows, rows, key_cache, value_cache, slots, **scales)
        return pagedkv.paged_attention(query, tables, key_cache, value_cache, lens, **scales)

    scale = torch.tensor([0.1, 0.2])
    check_compiled(function, lambda: (*caches(cache_dtype), scale, *inputs().values()), compiler)


@pytest.mark.parametrize("compiler", COMPILERS)
def test_every_operator_in_one_graph(compiler: str) -> None:
    def function(
        key_cache: Tensor,
        value_cache: Tensor,
        host_key: Tensor,
        host_value: Tensor,
        query: Tensor,
        *rest: Tensor,
    ) -> tuple[Tensor, ...]:
        rows, slots, tables, lens, cos, sin, mapping = rest
        rotated = query.repeat(2, 1, 1)[:3].contiguous()
        positions = slots % 5
        pagedkv.rope_and_cache(rotated, rows, rows, cos, sin, positions, key_cache, value_cache, slots)
        pagedkv.copy_blocks([key_cache], [value_cache], mapping)
        pagedkv.swap_blocks([key_cache, value_cache], [host_key, host_value], mapping)
        key, value = pagedkv.gather_kv(host_key, host_value, tables, lens, total_tokens=17)
        starts = torch.full_like(lens, 3)
        prefix = pagedkv.paged_attention(query, tables, key_cache, value_cache, starts, return_lse=True)
        suffix = pagedkv.paged_attention(
            query, tables, key_cache, value_cache, lens, kv_starts=starts, return_lse=True
        )
        return (rotated, key, value, *pagedkv.merge_attn_states(*prefix, *suffix))

    def make_arguments() -> tuple[Any, ...]:
        angles = torch.arange(5.0)[:, None] * torch.arange(1.0, 9.0)
        mapping = torch.tensor([[3, 5], [17, 0], [5, 3]])
        return (*caches(), *caches(), *inputs().values(), angles.cos(), angles.sin(), mapping)

    check_compiled(function, make_arguments, compiler)


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_dynamic_shapes(compiler: str) -> None:
    compiled = torch.compile(write_then_read, fullgraph=True, backend=compiler, dynamic=True)
    for num_seqs in (2, 3, 5):
        case = build_case([5 + i for i in range(num_seqs)], device=torch.device("cpu"))
        results = []
        for function in (write_then_read, compiled):
            key_cache, value_cache = case.key_cache.clone(), case.value_cache.clone()
            rows = torch.ones(num_seqs, 2, 16)
            slots = case.block_tables[:, 0].long() * 4
            out = function(
                key_cache, value_cache, case.query, rows, slots, case.block_tables, case.context_lens
            )
            results.append((out, key_cache, value_cache))
        for actual, expected in zip(*results, strict=True):
            assert_same_bits(actual, expected)


def test_gather_without_total_tokens() -> None:
    # The number of tokens is data: an unbacked size, which compiled code must take.
    def function(
        key_cache: Tensor, value_cache: Tensor, tables: Tensor, lens: Tensor
    ) -> tuple[Tensor, Tensor]:
        key, value = pagedkv.gather_kv(key_cache, value_cache, tables, lens)
        return key * 2, value

    tensors = inputs()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check_compiled(function, lambda: (*caches(), tensors["tables"], tensors["lens"]), "aot_eager")


def cache_copies(code: str) -> list[str]:
    """Lines of generated code that make something of a cache's size: an allocation, a clone or a copy."""
    size = rf"\(?{NUM_BLOCKS}, {BLOCK_SIZE}, {NUM_KV_HEADS}, {HEAD_DIM}\)?"
    elements = NUM_BLOCKS * BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM
    makes = rf"empty\w*\({size}|clone|copy_\(|{elements}L?\b"
    return [
        line.strip()
        for line in code.splitlines()
        if re.search(makes, line) and "assert_size_stride" not in line
    ]


@pytest.mark.parametrize("function", [write_then_read, write_twice_then_read])
def test_inductor_makes_no_copy_of_a_cache(function: Callable[..., Any]) -> None:
    compiled = torch.compile(function, fullgraph=True, backend="inductor")
    arguments = (*caches(), *inputs().values())
    pointers = [cache.data_ptr() for cache in arguments[:2]]
    _, codes = run_and_get_code(compiled, *arguments)
    assert codes
    for code in codes:
        assert "pagedkv" in code
        assert cache_copies(code) == []
    assert [cache.data_ptr() for cache in arguments[:2]] == pointers


def test_the_search_for_copies_finds_one() -> None:
    def copies(key_cache: Tensor) -> Tensor:
        return key_cache * 2

    _, codes = run_and_get_code(torch.compile(copies, fullgraph=True, backend="inductor"), caches()[0])
    assert any(cache_copies(code) for code in codes)


def test_two_layers_and_a_residual_make_no_copy() -> None:
    def model(hidden: Tensor, weights: Tensor, *layers_and_rest: Tensor) -> Tensor:
        *layers, slots, tables, lens = layers_and_rest
        for key_cache, value_cache in zip(layers[::2], layers[1::2], strict=True):
            fused = (hidden @ weights).view(2, 4 + 2 * NUM_KV_HEADS, HEAD_DIM)
            query, key, value = fused.split([4, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
            pagedkv.reshape_and_cache(key, value, key_cache, value_cache, slots)
            attended = pagedkv.paged_attention(query, tables, key_cache, value_cache, lens)
            hidden = hidden + attended.reshape(2, -1)
        return hidden

    generator = torch.Generator().manual_seed(0)
    width = 4 * HEAD_DIM
    weights = torch.randn(width, (4 + 2 * NUM_KV_HEADS) * HEAD_DIM, generator=generator) * 0.1

    def make_arguments() -> tuple[Tensor, ...]:
        tensors = inputs()
        hidden = torch.randn(2, width, generator=torch.Generator().manual_seed(2))
        last_slots = torch.tensor([17 * 4 + 1, 18 * 4 + 2])
        return (hidden, weights, *caches(), *caches(), last_slots, tensors["tables"], tensors["lens"])

    compiled = torch.compile(model, fullgraph=True, backend="inductor")
    expected_arguments, arguments = make_arguments(), make_arguments()
    expected = model(*expected_arguments)
    actual, codes = run_and_get_code(compiled, *arguments)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    for x, y in zip(arguments[2:6], expected_arguments[2:6], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    for code in codes:
        assert cache_copies(code) == []


def test_errors_show_while_tracing() -> None:
    tensors = inputs()
    key_cache, value_cache = caches()

    def function(query: Tensor) -> Any:
        return pagedkv.paged_attention(query, tensors["tables"], key_cache, value_cache, tensors["lens"])

    with pytest.raises(Exception, match=r"(?s)query.*head_dim|head_dim.*query|query"):
        torch.compile(function, fullgraph=True, backend="eager")(torch.zeros(2, 4, 8))
