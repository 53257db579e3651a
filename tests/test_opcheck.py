"""The registration of every operator: schemas, fakes, declared mutations, back-ends that were not built."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import FLOAT8_DTYPES, Case, assert_same_bits, bits, build_case, dtype_name
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import pagedkv
import pagedkv.ops
from pagedkv import reference

CPU = torch.device("cpu")
OPERATORS = (
    "paged_attention",
    "reshape_and_cache",
    "rope_and_cache",
    "copy_blocks",
    "swap_blocks",
    "gather_kv",
    "merge_attn_states",
)
Call = tuple[tuple[Any, ...], dict[str, Any]]

# The arguments of the torch operator that its schema must mark as mutated: these and no others.
MUTATED = {
    "paged_attention": {"out", "lse"},
    "reshape_and_cache": {"key_cache", "value_cache"},
    "rope_and_cache": {"query", "key_cache", "value_cache"},
    "copy_blocks": {"key_caches", "value_caches"},
    "swap_blocks": {"destinations"},
    "gather_kv": set(),
    "merge_attn_states": set(),
}


def clean_case(dtype: torch.dtype, cache_dtype: torch.dtype, **settings: Any) -> Case:
    """A case without NaN (the checks compare results with plain equality) in zeros instead of poison."""
    case = build_case([9, 4], [3, 2], device=CPU, dtype=dtype, cache_dtype=cache_dtype, **settings)
    for cache in case.arguments[2:4]:
        integers = reference.as_bytes(cache)
        integers.masked_fill_(~cache.float().isfinite() | (cache.float().abs() > 100), 0)
    return case


def calls(operator: str, dtype: torch.dtype, cache_dtype: torch.dtype) -> list[Call]:
    """Calls of the public function: a plain one, and one with every option it has."""
    case = clean_case(dtype, cache_dtype)
    scales = {name: case.options[name] for name in ("k_scale", "v_scale") if name in case.options}
    caches = case.key_cache, case.value_cache
    rows = torch.randn(5, 2, 16).to(dtype)
    slots = torch.tensor([0, 5, -1, 7])
    tables = torch.randn(50, 8), torch.randn(50, 8)
    float_scales = dict.fromkeys(scales, 0.5)
    if operator == "paged_attention":
        everything = {
            **case.keywords,
            "max_query_len": 3,
            "softmax_scale": 0.3,
            "window": 5,
            "softcap": 2.0,
            "alibi_slopes": torch.rand(4),
            "sinks": torch.rand(4),
            "kv_starts": torch.tensor([1, 0], dtype=torch.int32),
            "tree_mask": torch.rand(5, 3) < 0.5,
            "split_size": 4,
            "return_lse": True,
            "out": torch.empty(5, 4, 16, dtype=dtype),
            **float_scales,
        }
        decode = {"causal": False, **scales}
        return [
            (case.arguments, case.keywords),
            (case.arguments, everything),
            ((case.query[:2], *case.arguments[1:]), decode),
            ((case.query[0], case.block_tables[0], *caches, 9), scales),
        ]
    if operator == "reshape_and_cache":
        return [((rows, -rows, *caches, slots), scales), ((rows, -rows, *caches, slots), float_scales)]
    if operator == "rope_and_cache":
        query, positions = torch.randn(5, 3, 16).to(dtype), torch.tensor([4, 9, 0, 1, 2])
        arguments = (query, rows, -rows, *tables, positions, *caches, slots)
        return [(arguments, scales), (arguments, {"interleaved": True, **scales})]
    mapping = torch.tensor([[0, 1], [1, 2], [3, 3]])
    if operator == "copy_blocks":
        layers = [cache.clone() for cache in caches]
        return [((*caches, mapping), {}), (([caches[0], layers[0]], [caches[1], layers[1]], mapping), {})]
    if operator == "swap_blocks":
        others = [cache.clone().flip(0) for cache in caches]
        return [((caches[0], others[0], mapping), {}), ((list(caches), others, mapping), {})]
    if operator == "gather_kv":
        arguments = (*caches, case.block_tables, case.context_lens)
        everything = {
            "kv_starts": torch.tensor([2, 1], dtype=torch.int32),
            "total_tokens": 10,
            "dtype": torch.float32,
            **scales,
        }
        return [(arguments, scales), (arguments, everything)]
    states = (
        torch.randn(5, 4, 16).to(dtype),
        torch.randn(5, 4),
        torch.randn(5, 4, 16).to(dtype),
        torch.randn(5, 4),
    )
    return [(states, {})]


def library_calls(operator: str, call: Call, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """The arguments with which the public function calls the torch operator."""
    overload = getattr(torch.ops.pagedkv, operator).default
    recorded: list[tuple[Any, ...]] = []

    class Recorder:
        """Stands where the operator library stands, and notes what one operator is called with."""

        def __getattr__(self, name: str) -> Any:
            return self

        def default(self, *arguments: Any) -> Any:
            recorded.append(arguments)
            return overload(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(pagedkv.ops, "_library", Recorder())
        getattr(pagedkv.ops, operator)(*call[0], **call[1])
    assert len(recorded) == 1
    return recorded[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
@pytest.mark.parametrize("cache", ["same", "int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_mutable_arg_not_declared(
    operator: str, cache: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_dtype = dtype if cache == "same" else getattr(torch, cache)
    utilities = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if cache_dtype not in FLOAT8_DTYPES:  # torch compares inputs by `==`, which has no float8 kernel
        utilities.append("test_schema")
    for call in calls(operator, dtype, cache_dtype):
        arguments = library_calls(operator, call, monkeypatch)
        torch.library.opcheck(
            getattr(torch.ops.pagedkv, operator).default, arguments, test_utils=tuple(utilities)
        )


@pytest.mark.parametrize("cache_dtype", [*FLOAT8_DTYPES, torch.int8, torch.float32], ids=dtype_name)
@pytest.mark.parametrize("operator", OPERATORS)
def test_mutation_byte_by_byte(
    operator: str, cache_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    overload = getattr(torch.ops.pagedkv, operator).default
    for call in calls(operator, torch.float32, cache_dtype):
        arguments = library_calls(operator, call, monkeypatch)
        names = [argument.name for argument in overload._schema.arguments]
        named = dict(zip(names, arguments, strict=True))
        lists = {name: x if isinstance(x, list | tuple) else [x] for name, x in named.items()}
        tensors = {
            (name, i): x
            for name, xs in lists.items()
            for i, x in enumerate(xs)
            if isinstance(x, torch.Tensor)
        }
        before = {key: x.clone().contiguous().view(-1).view(torch.uint8) for key, x in tensors.items()}
        overload(*arguments)
        for (name, i), old in before.items():
            new = tensors[name, i].clone().contiguous().view(-1).view(torch.uint8)
            if name not in MUTATED[operator]:
                assert torch.equal(new, old), f"{name} changed, but is not declared to"


@pytest.mark.parametrize("operator", OPERATORS)
def test_schema_declares_exactly_what_is_mutated(operator: str) -> None:
    schema = getattr(torch.ops.pagedkv, operator).default._schema
    mutated = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    assert mutated == MUTATED[operator]
    assert len(schema.returns) == (2 if operator in ("gather_kv", "merge_attn_states") else 0)
    assert all(returned.alias_info is None for returned in schema.returns)
    assert torch.Tag.pt2_compliant_tag in getattr(torch.ops.pagedkv, operator).default.tags


@pytest.mark.parametrize("operator", OPERATORS)
def test_op_schema_drift_cpu_cuda(operator: str) -> None:
    # One schema serves all devices; the emulated library, which stands for CUDA here, has the same.
    from emulation import build

    build.load()
    schema = str(getattr(torch.ops.pagedkv, operator).default._schema)
    if hasattr(torch.ops.pagedkv_emulated, operator):
        emulated = str(getattr(torch.ops.pagedkv_emulated, operator).default._schema)
        assert emulated.replace("pagedkv_emulated::", "pagedkv::") == schema


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_keyword_can_be_given(operator: str) -> None:
    signature = inspect.signature(getattr(pagedkv.ops, operator))
    given: set[str] = set()
    for cache_dtype in (torch.int8, torch.float32):
        for arguments, keywords in calls(operator, torch.float32, cache_dtype):
            given |= set(signature.bind(*arguments, **keywords).arguments)
            getattr(pagedkv.ops, operator)(*arguments, **keywords)
    assert given | {"causal"} >= set(signature.parameters)


@pytest.mark.parametrize("operator", OPERATORS)
def test_reference_has_the_same_signature(operator: str) -> None:
    public = inspect.signature(getattr(pagedkv.ops, operator)).parameters
    specified = inspect.signature(getattr(reference, operator)).parameters
    ours = [(p.name, p.kind, p.default) for p in specified.values() if p.name != "compute_dtype"]
    assert ours == [(p.name, p.kind, p.default) for p in public.values()]
    assert getattr(pagedkv, operator) is getattr(pagedkv.ops, operator)


@pytest.mark.parametrize("operator", OPERATORS)
def test_built_without_cuda(operator: str) -> None:
    # Fake CUDA tensors need no GPU. Where the operator has a CUDA kernel there is nothing to refuse.
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"pagedkv::{operator}", "CUDA"):
        return
    arguments, keywords = calls(operator, torch.float32, torch.float32)[0]

    def to_cuda(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return torch.empty(x.shape, dtype=x.dtype, device="cuda")
        return x

    with FakeTensorMode(), pytest.raises((RuntimeError, ValueError), match=r"CUDA"):
        getattr(pagedkv.ops, operator)(
            *[to_cuda(x) for x in arguments], **{k: to_cuda(v) for k, v in keywords.items()}
        )


# Mistakes in shape and dtype that a fake must refuse as the operator does.
FAKE_MISTAKES: dict[str, list[tuple[type[Exception], str, Callable[[torch.Tensor], Any]]]] = {
    "paged_attention": [
        (ValueError, "query", lambda x: x[..., :8]),
        (ValueError, "query", lambda x: x[:, :3]),
        (TypeError, "query", lambda x: x.double()),
        (TypeError, "block_tables", lambda x: x.long()),
        (ValueError, "context_lens", lambda x: x[:1]),
        (TypeError, "key_cache", lambda x: x.double()),
        (ValueError, "value_cache", lambda x: x[:, 1:]),
        (ValueError, "query_start_loc", lambda x: x[1:]),
        (ValueError, "block_tables", lambda x: x[0]),
    ],
    "reshape_and_cache": [
        (ValueError, "key", lambda x: x[..., :8]),
        (ValueError, "value", lambda x: x[1:]),
        (TypeError, "slot_mapping", lambda x: x.int()),
        (ValueError, "slot_mapping", lambda x: x.repeat(2)),
        (TypeError, "key_cache", lambda x: x.half()),
    ],
    "rope_and_cache": [
        (ValueError, "query", lambda x: x[1:]),
        (TypeError, "positions", lambda x: x.int()),
        (ValueError, "sin", lambda x: x[:, 1:]),
        (TypeError, "cos", lambda x: x.double()),
    ],
    "copy_blocks": [
        (ValueError, "block_mapping", lambda x: x[:, :1]),
        (TypeError, "block_mapping", lambda x: x.int()),
        (TypeError, "key_caches", lambda x: x.double()),
        (ValueError, "value_caches", lambda x: x[0]),
    ],
    "swap_blocks": [
        (ValueError, "block_mapping", lambda x: x[:, :1]),
        (TypeError, "block_mapping", lambda x: x.int()),
        (TypeError, "destination", lambda x: x.half()),
        (ValueError, "destination", lambda x: x[..., :8]),
    ],
    "gather_kv": [
        (TypeError, "key_cache", lambda x: x.double()),
        (ValueError, "value_cache", lambda x: x[1:]),
        (TypeError, "block_tables", lambda x: x.long()),
        (ValueError, "context_lens", lambda x: x[1:]),
    ],
    "merge_attn_states": [
        (ValueError, "out_b", lambda x: x[1:]),
        (TypeError, "lse_a", lambda x: x.double()),
        (TypeError, "out_a", lambda x: x.double()),
    ],
}


@pytest.mark.parametrize(
    ("operator", "mistake"),
    [(name, i) for name, mistakes in FAKE_MISTAKES.items() for i in range(len(mistakes))],
)
def test_fakes_raise_the_same_errors(operator: str, mistake: int) -> None:
    exception, name, change = FAKE_MISTAKES[operator][mistake]
    arguments, keywords = calls(operator, torch.float32, torch.float32)[0]
    function = getattr(pagedkv.ops, operator)
    named = dict(inspect.signature(function).bind(*arguments, **keywords).arguments)
    named[name] = change(named[name])
    with pytest.raises(exception, match=name):
        function(**named)
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        fakes = {
            key: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
            for key, value in named.items()
        }
        # Of two caches that disagree either may be named.
        with pytest.raises(exception, match=name.replace("key_cache", "_cache")):
            function(**fakes)


def test_fakes_give_the_right_shapes() -> None:
    with FakeTensorMode():
        query = torch.empty(5, 4, 24, dtype=torch.bfloat16)
        keys = torch.empty(7, 16, 2, 24, dtype=torch.float8_e4m3fn)
        values = torch.empty(7, 16, 2, 40, dtype=torch.float8_e4m3fn)
        tables, lens = torch.empty(5, 3, dtype=torch.int32), torch.empty(5, dtype=torch.int32)
        out, lse = pagedkv.paged_attention(query, tables, keys, values, lens, return_lse=True)
        assert (out.shape, out.dtype) == ((5, 4, 40), torch.bfloat16)
        assert (lse.shape, lse.dtype) == ((5, 4), torch.float32)
        key, value = pagedkv.gather_kv(keys, values, tables, lens, total_tokens=33)
        assert (key.shape, key.dtype) == ((33, 2, 24), torch.float32)
        assert (value.shape, value.dtype) == ((33, 2, 40), torch.float32)
        key, _ = pagedkv.gather_kv(keys, values, tables, lens, total_tokens=33, dtype=torch.float16)
        assert key.dtype == torch.float16
        merged, merged_lse = pagedkv.merge_attn_states(out, lse, out, lse)
        assert (merged.shape, merged.dtype) == ((5, 4, 40), torch.bfloat16)
        assert (merged_lse.shape, merged_lse.dtype) == ((5, 4), torch.float32)


def test_meta_tensors() -> None:
    case = clean_case(torch.float32, torch.float32)
    meta = [x.to("meta") for x in case.arguments]
    out = pagedkv.paged_attention(*meta, query_start_loc=case.query_start_loc.to("meta"))
    assert out.device.type == "meta"
    assert out.shape == (5, 4, 16)


def test_positional_results_match_the_public_function(monkeypatch: pytest.MonkeyPatch) -> None:
    # The recorder that these tests rest on does not change what is computed.
    call = calls("paged_attention", torch.float32, torch.float32)[0]
    expected = pagedkv.paged_attention(*call[0], **call[1])
    arguments = library_calls("paged_attention", call, monkeypatch)
    out = arguments[
        [a.name for a in torch.ops.pagedkv.paged_attention.default._schema.arguments].index("out")
    ]
    assert_same_bits(out, expected)
    assert bits(out).any()
