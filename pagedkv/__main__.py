"""`python -m pagedkv`: what this build can do here, and what to do about what it cannot."""

from __future__ import annotations

import importlib.metadata
import platform

import torch

from pagedkv import __version__, _build_info, _loader

MINIMUM_TRANSFORMERS = (5, 24)


def describe_cpu() -> list[str]:
    """The CPU back-end: every build has it."""
    return [
        f"yes, {torch.get_num_threads()} threads (torch.set_num_threads)",
        f"instruction set of attention: {_loader.CPU_ISA} "
        f"(PAGEDKV_CPU_ISA sets another of {_loader.CPU_ISAS})",
    ]


def describe_cuda() -> list[str]:
    """The CUDA back-end: whether it was built and why, for which architectures, and what it finds."""
    if _build_info.CUDA_VERSION is None:
        return [f"not built: {_build_info.CUDA_REASON}"]
    lines = [
        f"built with CUDA {_build_info.CUDA_VERSION} ({_build_info.CUDA_REASON})",
        f"architectures: {_build_info.CUDA_ARCH_LIST.replace(';', ' ')} (TORCH_CUDA_ARCH_LIST sets others)",
        f"operators: {', '.join(sorted(_loader.CUDA_OPS))}",
    ]
    if not torch.cuda.is_available():
        return [
            *lines,
            "devices: none; see whether nvidia-smi lists one, and CUDA_VISIBLE_DEVICES",
        ]
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        architecture = f"{capability[0]}.{capability[1]}"
        line = f"device {index}: {torch.cuda.get_device_name(index)}, architecture {architecture}"
        if not runs_on(capability, _build_info.CUDA_ARCH_LIST):
            line += f", not covered: reinstall pagedkv with TORCH_CUDA_ARCH_LIST={architecture}"
        lines.append(line)
    return lines


def runs_on(capability: tuple[int, int], arch_list: str) -> bool:
    """Whether code for these architectures runs on a card.

    Machine code runs on cards of the same major and at least the same minor version, PTX on every later card.

    >>> runs_on((8, 6), "8.0;9.0+PTX"), runs_on((10, 3), "8.0;9.0+PTX"), runs_on((10, 3), "8.0;9.0")
    (True, True, False)
    """
    for entry in arch_list.replace(";", " ").split():
        number, _, suffix = entry.partition("+")
        if not number[-1].isdigit():  # 9.0a: for exactly that architecture
            if f"{capability[0]}.{capability[1]}" == number[:-1]:
                return True
            continue
        major, minor = (int(part) for part in number.split("."))
        if major == capability[0] and minor <= capability[1]:
            return True
        if suffix == "PTX" and (major, minor) <= capability:
            return True
    return False


def describe_transformers() -> list[str]:
    """Hugging Face transformers, for pagedkv.integrations.transformers."""
    wanted = ".".join(map(str, MINIMUM_TRANSFORMERS))
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return [f"not installed: pip install 'transformers>={wanted}'"]
    if tuple(int(part) for part in version.split(".")[:2]) < MINIMUM_TRANSFORMERS:
        return [f"{version} is too old: pip install 'transformers>={wanted}'"]
    return [version]


def main() -> None:
    """Print the report."""
    report = {
        "pagedkv": [__version__],
        "torch": [f"{torch.__version__}, the one that pagedkv was built for"],  # another is an ImportError
        "Python": [f"{platform.python_version()}, {platform.system()} on {platform.machine()}"],
        "CPU": describe_cpu(),
        "CUDA": describe_cuda(),
        "transformers": describe_transformers(),
    }
    for name, lines in report.items():
        print(f"{name:<14}{lines[0]}")
        for line in lines[1:]:
            print(f"{'':<14}{line}")


if __name__ == "__main__":
    main()
