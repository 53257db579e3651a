"""What a planted fault is, and the reports by which most of them are caught."""

from __future__ import annotations

from dataclasses import dataclass

FAILED_CHECK = r"not true: "
RACE = r"ThreadSanitizer: data race"


@dataclass(frozen=True)
class Mutant:
    """A fault in one place of the CUDA kernels, and the check that must notice it."""

    name: str
    files: str  # where `text` stands, exactly once: a pattern under csrc/cuda
    text: str
    replacement: str
    unit: str  # the file under csrc/cuda that is compiled again
    test: str  # part of the names of the kernel tests that are run
    build: str  # how both are compiled: plain, asan (with UBSan) or tsan
    report: str  # regular expression: what the run must print
