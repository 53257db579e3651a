"""What the operator tests share: back-ends, poisoned inputs, and the rule that says when a result is right.

The central piece is :func:`build_case`. It lays random keys and values out in shuffled physical blocks and
fills everything that no query may see (slots past the end, before ``kv_starts``, outside every window, unused
blocks, the memory around the caches, the unused entries of the block table) with values that cannot go
unnoticed: NaN, infinities, huge numbers, block ids of -1 and 2**31 - 1.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from pagedkv import reference

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
QUANTIZED_DTYPES = (*FLOAT8_DTYPES, torch.int8)
CACHE_DTYPES = (*FLOAT_DTYPES, *QUANTIZED_DTYPES)
# (query dtype, cache dtype): every pair the contract allows.
DTYPE_PAIRS = [(dtype, cache) for dtype in FLOAT_DTYPES for cache in (dtype, *QUANTIZED_DTYPES)]
# Bad block ids for entries that must not be read.
UNUSED_BLOCK_IDS = (-1, 2**31 - 1, -(2**31), 99_999)


def dtype_name(value: object) -> str | None:
    """Test ids: ``bfloat16`` rather than ``dtype3``."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


# ----------------------------------------------------------------------------------------- back-ends


@dataclasses.dataclass(frozen=True)
class Backend:
    """One way to run the operators: ``cpu``, ``emulated`` (CUDA kernels on the CPU) or ``cuda``."""

    name: str
    device: torch.device
    ops: ModuleType  # the eight public functions

    @property
    def checks_indices(self) -> bool:
        """Whether a bad index is raised without being asked for."""
        return self.name == "cpu"

    @contextlib.contextmanager
    def index_checks(self) -> Iterator[None]:
        """A block within which bad indices are raised, as they always are for CPU tensors."""
        import pagedkv

        if self.checks_indices:
            yield
            return
        pagedkv.set_debug(True)
        try:
            yield
        finally:
            pagedkv.set_debug(False)

    def tensor(self, values: Sequence[Any], dtype: torch.dtype = torch.int32) -> Tensor:
        """A small tensor on the back-end's device; int32, as tables and lengths are."""
        return torch.tensor(values, dtype=dtype, device=self.device)

    def slots(self, values: Sequence[int]) -> Tensor:
        """A slot mapping."""
        return self.tensor(values, torch.int64)


# ----------------------------------------------------------------------------------- poisoned memory


def poison_(tensor: Tensor) -> Tensor:
    """Fill a tensor of any dtype with NaN, infinities and huge values in turn; int8 with its extremes."""
    if tensor.dtype == torch.int8:
        pattern = torch.tensor([-128, 127, -127, 126, 99], dtype=torch.int8)
    elif tensor.dtype in FLOAT_DTYPES or tensor.dtype in FLOAT8_DTYPES:
        limit = torch.finfo(tensor.dtype).max
        pattern = torch.tensor([torch.nan, torch.inf, -torch.inf, limit, -limit]).to(tensor.dtype)
    else:
        raise TypeError(f"no poison for {tensor.dtype}")
    repeats = -(-tensor.numel() // pattern.numel())
    filler = reference.as_bytes(pattern).repeat(repeats)[: tensor.numel()].reshape(tensor.shape)
    reference.as_bytes(tensor).copy_(filler)
    return tensor


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A contiguous poisoned tensor."""
    return poison_(torch.empty(shape, dtype=dtype, device=device))


def embed(tensor: Tensor, margin: int = 16, *, tail_dim: int = 0) -> Tensor:
    """An equal tensor whose memory is surrounded by poison, in every dimension.

    Dimension 1 (heads) has poisoned neighbours, the last dimension ``tail_dim`` poisoned elements after it.
    """
    device = tensor.device
    lead, heads, last = tensor.shape
    buffer = poisoned(
        (lead + 2) * (heads + 2) * (last + tail_dim) + margin, dtype=tensor.dtype, device=device
    )
    view = buffer[margin:].view(lead + 2, heads + 2, last + tail_dim)[1:-1, 1:-1, :last]
    reference.as_bytes(view).copy_(reference.as_bytes(tensor))
    return view


LAYOUTS = ("contiguous", "hnd", "interleaved", "layer", "padded")


def poisoned_caches(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dims: tuple[int, int],
    dtype: torch.dtype,
    layout: str,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """A key and a value cache full of poison, in one of the memory layouts of the contract."""
    head_dim, value_head_dim = head_dims
    common_dim = max(head_dims)
    empty = {"dtype": dtype, "device": device}
    if layout == "contiguous":
        return (
            poisoned(num_blocks, block_size, num_kv_heads, head_dim, **empty),
            poisoned(num_blocks, block_size, num_kv_heads, value_head_dim, **empty),
        )
    if layout == "hnd":  # heads outside tokens, seen through a transpose
        return (
            poisoned(num_blocks, num_kv_heads, block_size, head_dim, **empty).transpose(1, 2),
            poisoned(num_blocks, num_kv_heads, block_size, value_head_dim, **empty).transpose(1, 2),
        )
    if layout == "interleaved":  # a block's keys and values side by side in one tensor
        pool = poisoned(num_blocks, 2, block_size, num_kv_heads, common_dim, **empty)
        return pool[:, 0, ..., :head_dim], pool[:, 1, ..., :value_head_dim]
    if layout == "layer":  # one layer of a tensor that holds several
        pool = poisoned(3, 2, num_blocks, block_size, num_kv_heads, common_dim, **empty)
        return pool[1, 0, ..., :head_dim], pool[1, 1, ..., :value_head_dim]
    if layout == "padded":  # heads and rows with gaps, at an odd offset
        shape = (num_blocks, block_size, num_kv_heads + 1, common_dim + 8)
        pools = [poisoned(1 + torch.Size(shape).numel(), **empty)[1:].view(shape) for _ in range(2)]
        return pools[0][:, :, 1:, :head_dim], pools[1][:, :, :-1, 8 : 8 + value_head_dim]
    raise ValueError(f"unknown layout {layout}")


MAP_NORESERVE = 0x4000  # Linux's; the mmap module does not name it


def sparse_zeros(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros of which, on the CPU, only the pages that are touched take memory."""
    num_bytes = num_elements * dtype.itemsize
    if device.type == "cuda":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device).view(dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=torch.uint8).view(dtype)


HUGE_BLOCK_STRIDE = 2**20
# Blocks of a huge cache that start just below, at and above 2**31 bytes and elements, and above 2**32.
HUGE_BLOCKS = (511, 512, 1024, 2047, 2048, 2049, 3000, 4096, 4097)


def huge_cache(dtype: torch.dtype, device: torch.device, block_size: int = 16, head_dim: int = 8) -> Tensor:
    """A cache of 4100 blocks, 2**20 elements apart, with memory wherever a 32-bit offset would wrap to."""
    num_blocks = HUGE_BLOCKS[-1] + 3
    room_below = 2**31  # offsets from 2**31 to 2**32 wrap to negative ones
    storage = sparse_zeros(room_below + num_blocks * HUGE_BLOCK_STRIDE, dtype, device)
    shape = (num_blocks, block_size, 1, head_dim)
    return storage.as_strided(shape, (HUGE_BLOCK_STRIDE, head_dim, head_dim, 1), room_below)


# ---------------------------------------------------------------------------------- attention inputs


@dataclasses.dataclass
class Case:
    """The arguments of one attention call and, for independent checks, the dense keys and values."""

    query: Tensor
    block_tables: Tensor
    key_cache: Tensor
    value_cache: Tensor
    context_lens: Tensor
    query_start_loc: Tensor | None
    options: dict[str, Any]
    keys: list[Tensor]  # one [context_len, num_kv_heads, head_dim] float32 a sequence, dequantised
    values: list[Tensor]

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The positional arguments of ``paged_attention``."""
        return self.query, self.block_tables, self.key_cache, self.value_cache, self.context_lens

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments that the case itself fixes."""
        return {"query_start_loc": self.query_start_loc, **self.options}

    def run(self, backend: Backend, **options: Any) -> Any:
        """Call the back-end's ``paged_attention``."""
        return backend.ops.paged_attention(*self.arguments, **{**self.keywords, **options})

    def sequence(self, seq_idx: int) -> Case:
        """One sequence of the batch as a batch of its own."""
        begin, end = seq_idx, seq_idx + 1
        if self.query_start_loc is not None:
            begin, end = self.query_start_loc[seq_idx : seq_idx + 2].tolist()
        options = dict(self.options)
        for name, rows in (("kv_starts", slice(seq_idx, seq_idx + 1)), ("tree_mask", slice(begin, end))):
            if options.get(name) is not None:
                options[name] = options[name][rows]
        query_start_loc = self.query_start_loc
        if query_start_loc is not None:
            query_start_loc = query_start_loc.new_tensor([0, end - begin])
        return dataclasses.replace(
            self,
            query=self.query[begin:end],
            block_tables=self.block_tables[seq_idx : seq_idx + 1],
            context_lens=self.context_lens[seq_idx : seq_idx + 1],
            query_start_loc=query_start_loc,
            options=options,
            keys=self.keys[seq_idx : seq_idx + 1],
            values=self.values[seq_idx : seq_idx + 1],
        )


def build_case(
    context_lens: Sequence[int],
    query_lens: Sequence[int] | None = None,
    *,
    device: torch.device,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    value_head_dim: int | None = None,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    layout: str = "contiguous",
    seed: int = 0,
    kv_starts: Sequence[int] | None = None,
    window: int | None = None,
    k_scale: Any = "default",
    v_scale: Any = "default",
    num_padding_rows: int = 0,
    extra_table_entries: int = 2,
    strided_query: bool = False,
    **options: Any,
) -> Case:
    """Random inputs for ``paged_attention``; everything that no query may see is poison.

    ``options`` are passed to the operator; ``kv_starts`` and ``window`` also decide what is poisoned. The
    scales default to different non-unit values a head where the cache is quantised.
    """
    generator = torch.Generator().manual_seed(seed)
    cache_dtype = dtype if cache_dtype is None else cache_dtype
    value_head_dim = head_dim if value_head_dim is None else value_head_dim
    rows = [1] * len(context_lens) if query_lens is None else list(query_lens)

    for name, scale, factor in (("k_scale", k_scale, 0.02), ("v_scale", v_scale, 0.03)):
        if isinstance(scale, str):
            scale = None
            if cache_dtype in QUANTIZED_DTYPES:
                scale = factor * (1 + torch.arange(num_kv_heads, dtype=torch.float32, device=device))
        if scale is not None:
            options[name] = scale
    if kv_starts is not None:
        options["kv_starts"] = torch.tensor(kv_starts, dtype=torch.int32, device=device)
    if window is not None:
        options["window"] = window

    blocks_needed = [-(-length // block_size) for length in context_lens]
    num_blocks = sum(blocks_needed) + 3
    physical_blocks = torch.randperm(num_blocks, generator=generator).tolist()
    width = max([1, *blocks_needed]) + extra_table_entries
    tables = torch.tensor(UNUSED_BLOCK_IDS, dtype=torch.int64).repeat(len(context_lens), width)[:, :width]
    tables = tables.to(torch.int32).contiguous()
    caches = poisoned_caches(
        num_blocks, block_size, num_kv_heads, (head_dim, value_head_dim), cache_dtype, layout, device
    )

    dense: tuple[list[Tensor], list[Tensor]] = ([], [])
    for seq_idx, context_len in enumerate(context_lens):
        kv_start = 0 if kv_starts is None else kv_starts[seq_idx]
        begin, end = reference.needed_keys(rows[seq_idx], context_len, kv_start, window)
        for block_idx in range(begin // block_size, -(-end // block_size)):
            tables[seq_idx, block_idx] = physical_blocks.pop()
        slots = reference.token_slots(tables, seq_idx, begin, end, caches[0])
        for cache, scale_name, sequences in zip(caches, ("k_scale", "v_scale"), dense, strict=True):
            x = torch.randn(context_len, num_kv_heads, cache.shape[3], generator=generator)
            scale = options.get(scale_name)
            x = x.to(device).to(dtype)
            stored = reference.quantize(x, scale, cache_dtype)
            reference.as_bytes(cache)[slots // block_size, slots % block_size] = reference.as_bytes(
                stored[begin:end]
            )
            sequences.append(reference.dequantize(stored, scale, torch.float32))

    num_tokens = sum(rows) + num_padding_rows
    query = torch.randn(num_tokens, num_heads, head_dim, generator=generator).to(device).to(dtype)
    if num_padding_rows:
        poison_(query[sum(rows) :])
    query_start_loc = None
    if query_lens is not None:
        query_start_loc = torch.tensor([0, *rows]).cumsum(0).to(torch.int32).to(device)
    return Case(
        query=embed(query, tail_dim=8) if strided_query else query,
        block_tables=tables.to(device),
        key_cache=caches[0],
        value_cache=caches[1],
        context_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
        query_start_loc=query_start_loc,
        options=options,
        keys=dense[0],
        values=dense[1],
    )


# ------------------------------------------------------------------------------ what counts as right


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """The reference is many tiny operations, which threads only slow down."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def check_attention(backend: Backend, case: Case, **options: Any) -> Tensor:
    """Run the case and compare output and lse with the reference; returns the output."""
    out, lse = case.run(backend, return_lse=True, **options)
    keywords = {**case.keywords, **options, "return_lse": True}
    dtype = case.query.dtype
    with one_thread():
        exact_out, exact_lse = reference.paged_attention(
            *case.arguments, **keywords, compute_dtype=torch.float64
        )
        plain_out, plain_lse = reference.paged_attention(
            *case.arguments, **keywords, compute_dtype=torch.float32
        )
        if dtype != torch.float32:
            plain_out, _ = reference.paged_attention(*case.arguments, **keywords, compute_dtype=dtype)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert_as_exact_as(out, exact_out, plain_out, what="out")
    # lse is accumulated in float32 whatever the query's dtype; its error is the relative error of a long sum.
    assert_as_exact_as(lse, exact_lse, plain_lse, what="lse", slack=1e-5)
    return out


def assert_as_exact_as(
    actual: Tensor, exact: Tensor, plain: Tensor, *, what: str, slack: float = 0.0
) -> None:
    """The tolerance rule: at most 3 times the error of a plain computation in the same dtype, plus one ulp.

    ``exact`` is the float64 result, ``plain`` the same computation in the dtype of ``actual``; the ulp is
    taken at the largest magnitude of the exact result. The plain error is a sample of something random, and
    may be next to nothing where there are few elements, so it counts as two float32 epsilons of that
    magnitude at least.
    """
    assert actual.shape == exact.shape, f"{what} has shape {tuple(actual.shape)}, not {tuple(exact.shape)}"
    finite = torch.isfinite(exact)
    largest = exact[finite].abs().max().item() if finite.any() else 0.0
    plain_error = (plain.double() - exact)[finite].abs().max().item() if finite.any() else 0.0
    plain_error = max(plain_error, 2 * torch.finfo(torch.float32).eps * largest)
    tolerance = 3 * plain_error + ulp(largest, actual.dtype) + slack
    wrong = ~((actual.double() - exact).abs() <= tolerance)  # NaN is wrong too
    wrong &= ~(
        (actual.double() == exact) | (actual.isnan() & exact.isnan())
    )  # equal infinities and NaN are right
    _report(wrong, actual, exact, f"{what} differs by more than {tolerance:.3g}")


def ulp(magnitude: float, dtype: torch.dtype) -> float:
    """The distance between neighbouring numbers of ``dtype`` at ``magnitude``."""
    info = torch.finfo(dtype)
    if magnitude < info.tiny:
        return info.tiny * info.eps
    return float(2.0 ** torch.tensor(magnitude, dtype=torch.float64).log2().floor().item() * info.eps)


def assert_same_bits(actual: Tensor, expected: Tensor, what: str = "result") -> None:
    """Equal dtype, shape and bits (so NaN equals the same NaN, and 0 is not -0)."""
    assert actual.dtype == expected.dtype, f"{what} is {actual.dtype}, not {expected.dtype}"
    assert actual.shape == expected.shape, (
        f"{what} has shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    )
    wrong = reference.as_bytes(actual) != reference.as_bytes(expected)
    _report(wrong, actual, expected, f"{what} differs in its bits")


def _report(wrong: Tensor, actual: Tensor, expected: Tensor, message: str) -> None:
    if wrong.any():
        first = tuple(torch.nonzero(wrong)[0].tolist())
        raise AssertionError(
            f"{message} in {int(wrong.sum())} of {wrong.numel()} elements; the first is at {first}: "
            f"{actual[first].item()!r}, expected {expected[first].item()!r}"
        )


def bits(tensor: Tensor) -> Tensor:
    """A copy of a tensor's bits, to compare with later."""
    return reference.as_bytes(tensor).clone()
