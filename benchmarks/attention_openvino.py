"""OpenVINO's paged attention on the same data: a model of one operator, in the layout its CPU plugin chooses.

The operator is not part of OpenVINO's public interface. It also writes the new keys and values into the
cache, which costs little beside a prompt's attention. Its threads are not OpenMP's, whose own spin for a
moment after a parallel region: on more than one thread that costs it a little at the start of a sample.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import openvino
import openvino.op
import torch
from attention_cases import DTYPES, Call, Case, Shape
from openvino import opset13

_TYPES = {"bf16": openvino.Type.bf16, "fp32": openvino.Type.f32}


def openvino_calls(case: Case) -> list[Call]:
    """One call a layer, each with a cache of its own, in which all but the queries' tokens are written."""
    shape, dtype = case.shape, DTYPES[case.shape.dtype]
    request = _compile(shape).create_infer_request()
    cache_shape = [n.get_length() if n.is_static else 0 for n in request.model_inputs[3].partial_shape]
    block_size = cache_shape[2]
    blocks_per_seq = -(-shape.context // block_size)
    cache_shape[0] = shape.batch * blocks_per_seq
    begins = np.arange(0, cache_shape[0] + 1, blocks_per_seq, dtype=np.int32)
    past = shape.context - shape.query_len

    def inputs(layer: int, query: openvino.Tensor, begin: int, end: int) -> dict[str, openvino.Tensor]:
        """A call for tokens [begin, end) of every sequence."""
        key, value = (
            tensors[layer][:, :, begin:end].transpose(1, 2).flatten(2).flatten(0, 1).contiguous()
            for tensors in (case.keys, case.values)
        )
        return {
            "query": query,
            "key": _tensor(key, shape.dtype),
            "value": _tensor(value, shape.dtype),
            "past_lens": openvino.Tensor(np.full(shape.batch, begin, dtype=np.int32)),
            "subsequence_begins": openvino.Tensor(
                np.arange(0, shape.batch * (end - begin) + 1, end - begin, dtype=np.int32)
            ),
            "block_indices": openvino.Tensor(
                np.random.default_rng(layer).permutation(cache_shape[0]).astype(np.int32)
            ),
            "block_indices_begins": openvino.Tensor(begins),
            "max_context_len": openvino.Tensor(np.array(end, dtype=np.int32)),
        }

    def call_with(tensors: dict[str, openvino.Tensor]) -> None:
        for name, tensor in tensors.items():
            request.set_tensor(name, tensor)
        request.infer()

    query = _tensor(case.query.flatten(1), shape.dtype)
    layers = []
    for layer in range(case.num_layers):
        caches = {
            name: openvino.Tensor(_TYPES[shape.dtype], openvino.Shape(cache_shape))
            for name in ("key_cache.0", "value_cache.0")
        }
        if past > 0:
            zeros = torch.zeros(shape.batch * past, shape.heads * shape.head_dim, dtype=dtype)
            call_with(caches | inputs(layer, _tensor(zeros, shape.dtype), 0, past))
        layers.append(caches | inputs(layer, query, past, shape.context))

    def call(layer: int) -> torch.Tensor:
        call_with(layers[layer])
        out = request.get_output_tensor(0).data
        same_size = np.int16 if dtype.itemsize == 2 else np.float32
        return torch.from_numpy(out.view(same_size)).view(dtype).view(case.query.shape)

    return [functools.partial(call, layer) for layer in range(case.num_layers)]


def _compile(shape: Shape) -> Any:
    """The model, compiled for as many threads as torch has."""
    dtype, int32 = _TYPES[shape.dtype], openvino.Type.i32
    rows, kv_rows = [-1, shape.heads * shape.head_dim], [-1, shape.kv_heads * shape.head_dim]
    parameters = {
        "query": _parameter("query", rows, dtype),
        "key": _parameter("key", kv_rows, dtype),
        "value": _parameter("value", kv_rows, dtype),
        "key_cache.0": _parameter("key_cache.0", [-1, -1, -1, -1], openvino.Type.dynamic),
        "value_cache.0": _parameter("value_cache.0", [-1, -1, -1, -1], openvino.Type.dynamic),
        "past_lens": _parameter("past_lens", [-1], int32),
        "subsequence_begins": _parameter("subsequence_begins", [-1], int32),
        "block_indices": _parameter("block_indices", [-1], int32),
        "block_indices_begins": _parameter("block_indices_begins", [-1], int32),
    }
    max_context_len = _parameter("max_context_len", [], int32)

    def ints(*sizes: int) -> Any:
        return opset13.constant(np.zeros(sizes, np.int32))

    def floats(*sizes: int) -> Any:
        return opset13.constant(np.zeros(sizes, np.float32))

    options = [
        opset13.constant(np.float32(shape.head_dim**-0.5)),
        ints(),  # sliding window
        floats(0),  # ALiBi slopes
        max_context_len,
        ints(0),  # window of aggregated scores
        *(ints(0), ints(0, 0), floats(0, 0)),  # rotation of cached keys
        *(floats(0), ints(), ints()),  # sparse attention
        floats(0),  # sinks
        *(ints(), ints(0), ints(0), ints(0)),  # eviction
        ints(0),  # token types
        *(opset13.constant(np.zeros(0, np.uint8)), ints(0)),  # tree mask
    ]
    nodes = [*parameters.values(), *options]
    attention = openvino.op._PagedAttentionExtension([node.output(0) for node in nodes])
    info = attention.get_rt_info()
    info["num_k_heads"] = info["num_v_heads"] = shape.kv_heads
    info["k_head_size"] = info["v_head_size"] = shape.head_dim
    model = openvino.Model([attention.output(0)], [*parameters.values(), max_context_len], "attention")
    properties = {
        "INFERENCE_PRECISION_HINT": dtype,
        "KV_CACHE_PRECISION": dtype,
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,
    }
    return openvino.Core().compile_model(model, "CPU", properties)


def _parameter(name: str, sizes: list[int], dtype: openvino.Type) -> Any:
    parameter = openvino.op.Parameter(dtype, openvino.PartialShape(sizes))
    parameter.output(0).tensor.set_names({name})
    return parameter


def _tensor(source: torch.Tensor, dtype: str) -> openvino.Tensor:
    """A copy; numpy, through which one could share, has no bfloat16."""
    source = source.contiguous()
    tensor = openvino.Tensor(_TYPES[dtype], openvino.Shape(list(source.shape)))
    ctypes.memmove(tensor.data.ctypes.data, source.data_ptr(), source.nbytes)
    return tensor
