"""Loads the compiled operators, or says what is wrong with them and what to do."""

from __future__ import annotations

import torch

try:
    from pagedkv import _build_info
except ImportError as error:
    raise ImportError(
        "pagedkv is not built. In the repository run `pip install --no-build-isolation -e .` "
        "(a C++20 compiler and an installed torch are all it needs)"
    ) from error

if torch.__version__ != _build_info.TORCH_VERSION:
    raise ImportError(
        f"pagedkv was built for torch {_build_info.TORCH_VERSION}, but this is torch {torch.__version__}: "
        "compiled operators fit one version only. Reinstall it: "
        "`pip install --no-build-isolation --force-reinstall --no-deps <the pagedkv source>`"
    )

from pagedkv import _C  # type: ignore[attr-defined]

# Which kernels CPU attention uses, and which this processor could, worst first.
CPU_ISA: str = _C.CPU_ISA
CPU_ISAS: str = _C.CPU_ISAS

_OPS = (
    "copy_blocks",
    "gather_kv",
    "merge_attn_states",
    "paged_attention",
    "reshape_and_cache",
    "rope_and_cache",
    "swap_blocks",
)

CUDA_OPS = frozenset(
    op for op in _OPS if torch._C._dispatch_has_kernel_for_dispatch_key(f"pagedkv::{op}", "CUDA")
)


def explain_missing_cuda(op: str) -> str:
    """What to answer when `op` is called on CUDA tensors in a build without CUDA."""
    return f"{op}: pagedkv was built without CUDA: {_build_info.CUDA_REASON}"
