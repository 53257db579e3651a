"""paged_attention: each mistake raises the right exception, which names the argument; nothing is written."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import UNUSED_BLOCK_IDS, Backend, assert_same_bits, bits, build_case, dtype_name, poisoned

OPERATORS = ("paged_attention",)

ARGUMENTS = ("query", "block_tables", "key_cache", "value_cache", "context_lens")
Call = dict[str, Any]


def valid_call(backend: Backend, **settings: Any) -> Call:
    """Arguments by name, all right: sequences of 9 and 4 tokens, 3 and 2 of them queries."""
    case = build_case([9, 4], [3, 2], device=backend.device, **settings)
    return {**dict(zip(ARGUMENTS, case.arguments, strict=True)), **case.keywords}


def call(backend: Backend, arguments: Call) -> Any:
    positional = [arguments[name] for name in ARGUMENTS]
    return backend.ops.paged_attention(
        *positional, **{k: v for k, v in arguments.items() if k not in ARGUMENTS}
    )


def with_(**changes: Callable[[Call], Any]) -> Callable[[Call], Call]:
    """Replaces arguments by functions of the valid ones."""
    return lambda arguments: {**arguments, **{name: change(arguments) for name, change in changes.items()}}


def vector(dtype: torch.dtype, *shape: int) -> Callable[[Call], Any]:
    return lambda arguments: torch.ones(shape, dtype=dtype, device=arguments["query"].device)


# What is wrong -> the change that makes it so, and what the message must say.
VALUE_ERRORS: dict[str, tuple[Callable[[Call], Call], str]] = {
    "query rank": (with_(query=lambda a: a["query"][None]), "query.*num_tokens"),
    "query head_dim": (with_(query=lambda a: a["query"][..., :8]), "query.*head_dim|head_dim.*query"),
    "query strided last": (
        with_(query=lambda a: torch.zeros(5, 4, 32, device=a["query"].device)[..., ::2]),
        "query.*contiguous",
    ),
    "key_cache rank": (with_(key_cache=lambda a: a["key_cache"][0]), "key_cache.*num_blocks"),
    "value_cache rank": (with_(value_cache=lambda a: a["value_cache"][0]), "value_cache.*num_blocks"),
    "key_cache strided last": (
        with_(key_cache=lambda a: a["key_cache"].transpose(1, 3).contiguous().transpose(1, 3)),
        "key_cache.*contiguous",
    ),
    "value_cache strided last": (
        with_(value_cache=lambda a: a["value_cache"].transpose(2, 3).contiguous().transpose(2, 3)),
        "value_cache.*contiguous",
    ),
    "num_blocks differ": (with_(value_cache=lambda a: a["value_cache"][1:]), "value_cache.*num_blocks"),
    "block_size differs": (with_(value_cache=lambda a: a["value_cache"][:, 1:]), "value_cache.*block_size"),
    "num_kv_heads differ": (
        with_(value_cache=lambda a: a["value_cache"][:, :, 1:]),
        "value_cache.*num_kv_heads",
    ),
    "block_tables rank": (with_(block_tables=lambda a: a["block_tables"][0]), "block_tables.*num_seqs"),
    "block_tables rows": (
        with_(block_tables=lambda a: a["block_tables"][:1]),
        "block_tables|context_lens|query_start_loc",
    ),
    "context_lens length": (with_(context_lens=lambda a: a["context_lens"][:1]), "context_lens.*num_seqs"),
    "context_lens rank": (with_(context_lens=lambda a: a["context_lens"][None]), "context_lens.*num_seqs"),
    "query_start_loc length": (
        with_(query_start_loc=lambda a: a["query_start_loc"][:-1]),
        r"query_start_loc.*num_seqs \+ 1",
    ),
    "decode with too many rows": (with_(query_start_loc=lambda a: None), "query.*num_seqs"),
    "alibi_slopes length": (with_(alibi_slopes=vector(torch.float32, 3)), "alibi_slopes.*num_heads"),
    "sinks length": (with_(sinks=vector(torch.float32, 2)), "sinks.*num_heads"),
    "sinks rank": (with_(sinks=vector(torch.float32, 1, 4)), "sinks.*num_heads"),
    "kv_starts length": (with_(kv_starts=vector(torch.int32, 3)), "kv_starts.*num_seqs"),
    "tree_mask rows": (with_(tree_mask=vector(torch.bool, 4, 3)), "tree_mask.*num_tokens"),
    "tree_mask rank": (with_(tree_mask=vector(torch.bool, 5)), "tree_mask.*max_tree"),
    "tree_mask without causality": (
        with_(tree_mask=vector(torch.bool, 5, 3), causal=lambda a: False),
        "tree_mask.*causal",
    ),
    "window 0": (with_(window=lambda a: 0), "window.*0"),
    "window negative": (with_(window=lambda a: -1), "window.*-1"),
    "split_size 0": (with_(split_size=lambda a: 0), "split_size.*0"),
    "split_size negative": (with_(split_size=lambda a: -64), "split_size.*-64"),
    "softcap negative": (with_(softcap=lambda a: -1.0), "softcap.*-1"),
    "k_scale on a float cache": (with_(k_scale=lambda a: 1.0), "k_scale"),
    "v_scale on a float cache": (with_(v_scale=lambda a: 0.5), "v_scale"),
    "scale tensor on a float cache": (with_(k_scale=vector(torch.float32, 2)), "k_scale"),
    "out shape": (with_(out=vector(torch.float32, 5, 4, 8)), "out.*head_dim"),
    "out rows": (with_(out=vector(torch.float32, 4, 4, 16)), "out.*num_tokens"),
    "out strided last": (
        with_(out=lambda a: torch.zeros(5, 4, 32, device=a["query"].device)[..., ::2]),
        "out.*contiguous",
    ),
    "empty block": (
        with_(key_cache=lambda a: a["key_cache"][:, :0], value_cache=lambda a: a["value_cache"][:, :0]),
        "key_cache.*block_size",
    ),
    "no KV heads": (
        with_(key_cache=lambda a: a["key_cache"][:, :, :0], value_cache=lambda a: a["value_cache"][:, :, :0]),
        "num_kv_heads|multiple",
    ),
}

TYPE_ERRORS: dict[str, tuple[Callable[[Call], Call], str]] = {
    "query float64": (with_(query=lambda a: a["query"].double()), "query.*float16, bfloat16, float32"),
    "query int8": (with_(query=lambda a: a["query"].to(torch.int8)), "query.*float16, bfloat16, float32"),
    "query other than the cache": (with_(query=lambda a: a["query"].bfloat16()), "(?i)key_cache.*float"),
    "key_cache uint8": (
        with_(key_cache=lambda a: a["key_cache"].to(torch.uint8)),
        "key_cache.*float8_e4m3fn",
    ),
    "value_cache other than key_cache": (
        with_(value_cache=lambda a: a["value_cache"].half()),
        "value_cache.*key_cache",
    ),
    "block_tables int64": (with_(block_tables=lambda a: a["block_tables"].long()), "(?i)block_tables.*int"),
    "context_lens int64": (with_(context_lens=lambda a: a["context_lens"].long()), "(?i)context_lens.*int"),
    "query_start_loc int64": (
        with_(query_start_loc=lambda a: a["query_start_loc"].long()),
        "(?i)query_start_loc.*int",
    ),
    "kv_starts int64": (with_(kv_starts=vector(torch.int64, 2)), "(?i)kv_starts.*int"),
    "alibi_slopes float64": (with_(alibi_slopes=vector(torch.float64, 4)), "(?i)alibi_slopes.*float"),
    "sinks bfloat16": (with_(sinks=vector(torch.bfloat16, 4)), "(?i)sinks.*float"),
    "tree_mask int": (with_(tree_mask=vector(torch.int32, 5, 3)), "(?i)tree_mask.*bool"),
    "out dtype": (with_(out=vector(torch.bfloat16, 5, 4, 16)), "(?i)out.*float"),
}

QUANTISED_VALUE_ERRORS: dict[str, tuple[torch.dtype, Callable[[Call], Call], str]] = {
    "int8 without scales": (torch.int8, with_(k_scale=lambda a: None, v_scale=lambda a: None), "k_scale"),
    "int8 without v_scale": (torch.int8, with_(v_scale=lambda a: None), "v_scale"),
    "k_scale length": (torch.int8, with_(k_scale=vector(torch.float32, 3)), "k_scale.*num_kv_heads"),
    "v_scale rank": (torch.float8_e5m2, with_(v_scale=vector(torch.float32, 2, 1)), "v_scale.*num_kv_heads"),
}


@pytest.mark.parametrize("mistake", VALUE_ERRORS)
def test_value_errors(backend: Backend, mistake: str) -> None:
    change, message = VALUE_ERRORS[mistake]
    arguments = change(valid_call(backend))
    with pytest.raises(ValueError, match=f"(?s){message}"):
        call(backend, arguments)


@pytest.mark.parametrize("mistake", TYPE_ERRORS)
def test_type_errors(backend: Backend, mistake: str) -> None:
    change, message = TYPE_ERRORS[mistake]
    arguments = change(valid_call(backend))
    with pytest.raises(TypeError, match=f"(?s){message}"):
        call(backend, arguments)


@pytest.mark.parametrize("mistake", QUANTISED_VALUE_ERRORS)
def test_scale_errors(backend: Backend, mistake: str) -> None:
    cache_dtype, change, message = QUANTISED_VALUE_ERRORS[mistake]
    arguments = change(valid_call(backend, cache_dtype=cache_dtype))
    with pytest.raises(ValueError, match=f"(?s){message}"):
        call(backend, arguments)


def test_scale_dtype(backend: Backend) -> None:
    arguments = valid_call(backend, cache_dtype=torch.int8)
    for name in ("k_scale", "v_scale"):
        with pytest.raises(TypeError, match=f"(?is){name}.*float"):
            call(backend, {**arguments, name: torch.ones(2, dtype=torch.float64, device=backend.device)})


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(33, 2), (3, 2), (1, 2), (0, 2)])
@pytest.mark.parametrize("query_lens", [None, [1]], ids=["decode", "prefill"])
def test_gqa_not_divisible(
    backend: Backend, num_heads: int, num_kv_heads: int, query_lens: list[int] | None
) -> None:
    case = build_case([5], query_lens, device=backend.device, num_kv_heads=num_kv_heads)
    query = torch.zeros(1, num_heads, 16, device=backend.device)
    with pytest.raises(ValueError, match=rf"(?s)query.*{num_heads} heads.*{num_kv_heads}.*multiple"):
        backend.ops.paged_attention(query, *case.arguments[1:], **case.keywords)


@pytest.mark.parametrize("head_dim", [1, 4, 12, 100, 264, 512])
@pytest.mark.parametrize("which", ["key", "value"])
def test_unsupported_head_dim(backend: Backend, which: str, head_dim: int) -> None:
    dims = {"head_dim": head_dim, "value_head_dim": 16} if which == "key" else {"value_head_dim": head_dim}
    case = build_case([5], device=backend.device, **dims)
    with pytest.raises(ValueError, match=rf"(?s)head_dim.*{head_dim}.*8 .*256"):
        case.run(backend)


def test_errors_write_nothing(backend: Backend) -> None:
    arguments = valid_call(backend)
    out = poisoned(5, 4, 16, dtype=torch.float32, device=backend.device)
    before = bits(out)
    for change, message in VALUE_ERRORS.values():
        with pytest.raises(ValueError, match=f"(?s){message}"):
            call(backend, change({**arguments, "out": out}))
    bad_table = torch.full_like(arguments["block_tables"], 1000)
    with backend.index_checks(), pytest.raises(IndexError):
        call(backend, {**arguments, "block_tables": bad_table, "out": out})
    assert torch.equal(bits(out), before)


# ------------------------------------------------------------------------------------------- indices


@pytest.mark.parametrize("entry", [0, 1, 2])
@pytest.mark.parametrize("bad", UNUSED_BLOCK_IDS)
def test_needed_block_outside_the_pool(backend: Backend, entry: int, bad: int) -> None:
    arguments = valid_call(backend)
    arguments["block_tables"][0, entry] = bad
    with backend.index_checks(), pytest.raises(IndexError, match=rf"(?s)block_tables\[0, {entry}\].*{bad}"):
        call(backend, arguments)


def test_block_errors_name_the_sequence(backend: Backend) -> None:
    arguments = valid_call(backend)
    num_blocks = arguments["key_cache"].shape[0]
    arguments["block_tables"][1, 0] = num_blocks
    message = rf"(?s)block_tables\[1, 0\].*{num_blocks}.*{num_blocks} blocks"
    with backend.index_checks(), pytest.raises(IndexError, match=message):
        call(backend, arguments)


@pytest.mark.parametrize("hidden_by", ["window", "kv_starts", "no queries", "length 0"])
def test_blocks_that_are_not_needed_are_not_checked(backend: Backend, hidden_by: str) -> None:
    arguments = valid_call(backend)
    if hidden_by == "window":  # queries at 6, 7, 8 with a window of 3 see from key 4 on; block 0 holds 0 - 3
        arguments["window"] = 3
        bad_entries = (0, slice(0, 1))
    elif hidden_by == "kv_starts":
        arguments["kv_starts"] = backend.tensor([4, 0])
        bad_entries = (0, slice(0, 1))
    elif hidden_by == "no queries":
        arguments["query_start_loc"] = backend.tensor([0, 0, 2])
        bad_entries = (0, slice(None))
    else:
        arguments["context_lens"] = backend.tensor([0, 4])
        bad_entries = (0, slice(None))
    expected = call(backend, arguments)
    for bad in UNUSED_BLOCK_IDS:
        arguments["block_tables"][bad_entries] = bad
        with backend.index_checks():
            assert_same_bits(call(backend, arguments), expected)
    if hidden_by == "window":  # a query more brings key 3 into sight, and with it block 0
        arguments["window"] = 4
        with backend.index_checks(), pytest.raises(IndexError, match=r"block_tables\[0, 0\]"):
            call(backend, arguments)


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ([0, 3, 2], "query_start_loc.*fall|query_start_loc.*2"),
        ([0, -1, 5], "query_start_loc.*-1"),
        ([0, 3, 6], "query_start_loc.*6.*5"),
        ([1, 3, 5], "query_start_loc.*1.*0"),
    ],
)
def test_query_start_loc_values(backend: Backend, starts: list[int], message: str) -> None:
    arguments = {**valid_call(backend), "query_start_loc": backend.tensor(starts)}
    with backend.index_checks(), pytest.raises(ValueError, match=f"(?s){message}"):
        call(backend, arguments)


def test_negative_context_len(backend: Backend) -> None:
    arguments = {**valid_call(backend), "context_lens": backend.tensor([9, -1])}
    with backend.index_checks(), pytest.raises((IndexError, ValueError), match=r"(?s)context_lens\[1\].*-1"):
        call(backend, arguments)


@pytest.mark.parametrize(
    "starts", [[0, 3, 9], [0, -1, 5], [-2, 3, 5], [0, 4, 2], [0, 3, -4], [0, 3, 2**31 - 1]]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_query_start_loc_leads_to_no_row_outside(
    backend: Backend, dtype: torch.dtype, starts: list[int]
) -> None:
    if backend.checks_indices:
        pytest.skip("it is an error")
    arguments = {**valid_call(backend, dtype=dtype), "query_start_loc": backend.tensor(starts)}
    memory = torch.full((25, 4, 16), 7.0, dtype=dtype, device=backend.device)
    call(backend, {**arguments, "out": memory[10:15]})
    assert (memory[:10] == 7).all()
    assert (memory[15:] == 7).all()


@pytest.mark.parametrize("split_size", [None, 16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_keys_past_the_table_are_not_visible(
    backend: Backend, dtype: torch.dtype, split_size: int | None
) -> None:
    if backend.checks_indices:
        pytest.skip("they are an error")
    case = build_case([144, 40], device=backend.device, dtype=dtype, block_size=16, extra_table_entries=0)
    expected = case.run(backend, split_size=split_size, return_lse=True)
    for context_len in (145, 300, 2**31 - 1):
        longer = dataclasses.replace(case, context_lens=backend.tensor([context_len, 40]))
        results = longer.run(backend, split_size=split_size, return_lse=True)
        for result, as_expected in zip(results, expected, strict=True):
            assert_same_bits(result, as_expected, f"{context_len} tokens")


@pytest.mark.parametrize("split_size", [None, 16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_kv_starts_behind_the_end(backend: Backend, dtype: torch.dtype, split_size: int | None) -> None:
    case = build_case([144, 40], device=backend.device, dtype=dtype, block_size=16)
    options: dict[str, Any] = {"split_size": split_size, "return_lse": True}
    expected = case.run(backend, **options)
    for kv_start in (144, 145, 10_000, 2**31 - 1):
        out, lse = case.run(backend, kv_starts=backend.tensor([kv_start, 0]), **options)
        assert (out[0] == 0).all(), kv_start
        assert (lse[0] == -torch.inf).all(), kv_start
        assert_same_bits(out[1], expected[0][1])
        assert_same_bits(lse[1], expected[1][1])


# ---------------------------------------------------------------------------------- devices and grad


def test_device_guard(backend: Backend) -> None:
    # Two GPUs are needed to see a missing guard; so see to it that no binding can leave it out: device code
    # is reached through one helper, and that helper sets the guard.
    bindings = Path(__file__).parent.parent / "csrc" / "bindings"
    helper = (bindings / "checks.h").read_text()
    assert re.search(r"CUDAGuard guard\(device\)", helper)
    assert "getCurrentCUDAStream" in helper
    for source in bindings.glob("*.cpp"):
        assert not re.search(r"\bcuda::\w+\(", source.read_text()), (
            f"{source.name} calls device code by itself"
        )
    if backend.name == "cuda" and torch.cuda.device_count() > 1:
        case = build_case([9, 4], [3, 2], device=torch.device("cuda:1"))
        expected = build_case([9, 4], [3, 2], device=torch.device("cuda:0")).run(backend)
        assert_same_bits(case.run(backend).cpu(), expected.cpu())


@pytest.mark.parametrize("name", ["query", "key_cache", "value_cache", "sinks", "alibi_slopes", "out"])
def test_inference_only(backend: Backend, name: str) -> None:
    arguments = valid_call(backend)
    arguments |= {
        "sinks": torch.zeros(4, device=backend.device),
        "alibi_slopes": torch.zeros(4, device=backend.device),
    }
    expected = call(backend, arguments)
    arguments["out"] = torch.zeros_like(expected)
    arguments[name].requires_grad_()
    with pytest.raises(RuntimeError, match=rf"(?s){name}.*torch\.no_grad\(\)"):
        call(backend, arguments)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert_same_bits(call(backend, arguments).detach(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_inputs_are_not_changed(backend: Backend, dtype: torch.dtype) -> None:
    arguments = valid_call(backend, dtype=dtype)
    before = {name: bits(arguments[name]) for name in ("query", "key_cache", "value_cache")}
    small = {name: arguments[name].clone() for name in ("block_tables", "context_lens", "query_start_loc")}
    call(backend, arguments)
    for name, old in before.items():
        assert torch.equal(bits(arguments[name]), old), name
    for name, old in small.items():
        assert torch.equal(arguments[name], old), name
