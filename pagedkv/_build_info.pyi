"""Written by setup.py: what this build of pagedkv was made with."""

TORCH_VERSION: str
CUDA_VERSION: str | None
CUDA_ARCH_LIST: str
CUDA_REASON: str
