"""What must hold however late the device runs: order between operators, streams and host memory.

On the CPU and on the emulator a call has done its work when it returns, so there the tests see the plain
meaning; on CUDA a long kernel in front makes every missing order visible.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from helpers import Backend

OPERATORS = ["paged_attention", "reshape_and_cache", "swap_blocks"]
NUM_BLOCKS, BLOCK_SIZE, HEAD_DIM = 4, 16, 8


def make_cache(value: float, device: torch.device | str) -> torch.Tensor:
    return torch.full((NUM_BLOCKS, BLOCK_SIZE, 1, HEAD_DIM), value, device=device)


def keep_the_device_busy(backend: Backend) -> None:
    if backend.name == "cuda":
        torch.cuda._sleep(50_000_000)  # tens of milliseconds


@contextlib.contextmanager
def side_stream(backend: Backend) -> Iterator[None]:
    """A stream that has to wait for nothing, and that the current one waits for at the end."""
    if backend.name != "cuda":
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def write_block(backend: Backend, cache: torch.Tensor, block: int, value: float) -> None:
    rows = torch.full((BLOCK_SIZE, 1, HEAD_DIM), value, device=backend.device)
    slots = torch.arange(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE, device=backend.device)
    backend.ops.reshape_and_cache(rows, rows, cache, cache.clone(), slots)


def test_block_reused_before_offload_read(backend: Backend) -> None:
    cache, host = make_cache(0.0, backend.device), make_cache(-1.0, "cpu")
    for round_idx in range(100):
        write_block(backend, cache, 1, float(round_idx))
        with side_stream(backend):
            if round_idx % 20 == 0:
                keep_the_device_busy(backend)
            backend.ops.swap_blocks(cache, host, [(1, 2)])
        write_block(backend, cache, 1, -7.0)  # the block has a new owner at once
        backend.ops.swap_blocks(host, cache, [(2, 3)])
        assert (cache[3] == round_idx).all()
        assert (cache[1] == -7.0).all()


def test_offload_before_compute_finished(backend: Backend) -> None:
    cache, host = make_cache(0.0, backend.device), make_cache(-1.0, "cpu")
    with side_stream(backend):
        keep_the_device_busy(backend)
        write_block(backend, cache, 0, 3.0)
        backend.ops.swap_blocks(cache, host, [(0, 1)])  # on the current stream, so after the write
    if backend.name == "cuda":
        torch.cuda.synchronize()
    assert (host[1] == 3.0).all()


def attend_block(backend: Backend, cache: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    query = torch.ones(1, 1, HEAD_DIM, device=backend.device)
    lens = torch.full((1,), BLOCK_SIZE, dtype=torch.int32, device=backend.device)
    return backend.ops.paged_attention(query, tables, cache, cache, lens)


def test_pinned_staging_buffer_reuse(backend: Backend) -> None:
    cache = torch.arange(float(NUM_BLOCKS), device=backend.device)[:, None, None, None]
    cache = cache.expand(NUM_BLOCKS, BLOCK_SIZE, 1, HEAD_DIM).contiguous()
    keep_the_device_busy(backend)
    outs = []
    for block in (1, 2):  # the second table is built while the first call may not have run
        tables = torch.tensor([[block]], dtype=torch.int32, pin_memory=backend.name == "cuda")
        outs.append(attend_block(backend, cache, tables.to(backend.device, non_blocking=True)))
        del tables
    assert (outs[0] == 1.0).all()
    assert (outs[1] == 2.0).all()


def test_swap_between_two_devices(backend: Backend) -> None:
    if backend.name != "cuda" or torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for first, second in (("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")):
        source, destination = make_cache(1.0, first), make_cache(0.0, second)
        for device in (first, second):
            torch.cuda.synchronize(device)
        with torch.cuda.device(second):
            keep_the_device_busy(backend)
            destination.fill_(5.0)  # before the copy, though the source's stream is idle
        backend.ops.swap_blocks(source, destination, [(0, 1)])
        assert (destination[1].clone() == 1.0).all()  # after the copy


@pytest.mark.parametrize("split_size", [None, 64])
def test_graph_baked_host_scalars(backend: Backend, split_size: int | None) -> None:
    # Lengths and tables change in place behind the same call; on CUDA the call is a captured graph.
    max_blocks = 4000 // BLOCK_SIZE
    cache = torch.zeros(max_blocks, BLOCK_SIZE, 1, HEAD_DIM, device=backend.device)
    values = torch.arange(float(max_blocks * BLOCK_SIZE), device=backend.device)
    values = values.view(max_blocks, BLOCK_SIZE, 1, 1).expand(-1, -1, 1, HEAD_DIM).contiguous()
    query = torch.ones(1, 1, HEAD_DIM, device=backend.device)
    tables = torch.arange(max_blocks, dtype=torch.int32, device=backend.device)[None]
    lens = torch.tensor([64], dtype=torch.int32, device=backend.device)
    out = torch.empty(1, 1, HEAD_DIM, device=backend.device)

    def call() -> None:
        backend.ops.paged_attention(query, tables, cache, values, lens, split_size=split_size, out=out)

    replay = call
    if backend.name == "cuda":
        call()  # everything is loaded before the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        replay = graph.replay
    for context_len in (64, 70, 1000, 4000):
        lens.fill_(context_len)
        replay()
        mean = (context_len - 1) / 2  # K = 0, so the output is the mean of V[i] = i
        torch.testing.assert_close(out, torch.full_like(out, mean), rtol=1e-5, atol=0.0)
