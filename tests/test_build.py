"""The build: what setup.py decides, what the packages hold, and what a wrong environment is told."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import setuptools
import torch
from setuptools.command.build_ext import build_ext
from torch._subclasses.fake_tensor import FakeTensorMode

import pagedkv
from pagedkv import __main__ as report
from pagedkv import _build_info, _loader, ops

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = [Path(importlib.import_module(f"pagedkv.{name}").__file__ or "") for name in ("_core", "_C")]
cuda_build = pytest.mark.skipif(_build_info.CUDA_VERSION is None, reason="a property of CUDA builds")


@pytest.fixture
def setup_py(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """setup.py as a module, on a machine that has no CUDA toolkit of its own."""
    spec = importlib.util.spec_from_file_location("setup_py", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "setup_py", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "DEFAULT_CUDA_HOME", tmp_path / "none")
    return module


def fake_toolkit(home: Path, release: str) -> Path:
    """A CUDA toolkit whose nvcc can only say which it is."""
    nvcc = home / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(
        "#!/bin/sh\n"
        f'[ "$1" = --dryrun ] && echo "#$ TOP={home}" >&2 || echo "Cuda tools, release {release}, V0"\n'
    )
    nvcc.chmod(0o755)
    return home


def run_python(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run this Python in another process, from a directory that has no pagedkv of its own."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


class TestChooseCuda:
    """Fault no-cuda-home, and the rest of what the environment can ask for."""

    @pytest.mark.parametrize("platform", [("Darwin", "arm64"), ("Windows", "AMD64"), ("Linux", "riscv64")])
    def test_other_platforms_are_refused_with_a_sentence(
        self, setup_py: ModuleType, platform: tuple[str, str]
    ) -> None:
        with pytest.raises(
            SystemExit, match=rf"supports Linux on x86-64 and aarch64, not {' on '.join(platform)}"
        ):
            setup_py.check_platform(*platform)

    @pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
    def test_linux_is_accepted(self, setup_py: ModuleType, machine: str) -> None:
        setup_py.check_platform("Linux", machine)

    def test_cpu_torch_gives_a_cpu_build_even_beside_nvcc(self, setup_py: ModuleType, tmp_path: Path) -> None:
        home = fake_toolkit(tmp_path / "cuda", "13.0")
        choice = setup_py.choose_cuda({"CUDA_HOME": str(home)}, "2.13.0+cpu", None)
        assert not choice.enabled
        assert "torch 2.13.0+cpu is a CPU build; install a CUDA build of torch" in choice.reason

    def test_no_nvcc_gives_a_cpu_build_that_says_so(self, setup_py: ModuleType) -> None:
        choice = setup_py.choose_cuda({"PATH": ""}, "2.14.1", "13.0")
        assert not choice.enabled
        assert "no nvcc was found; install the CUDA 13.0 toolkit, or set CUDA_HOME" in choice.reason

    def test_cuda_home_without_nvcc_is_named(self, setup_py: ModuleType, tmp_path: Path) -> None:
        choice = setup_py.choose_cuda({"CUDA_HOME": str(tmp_path)}, "2.14.1", "13.0")
        assert not choice.enabled
        assert f"CUDA_HOME is {tmp_path}, which has no bin/nvcc" in choice.reason

    def test_toolkit_of_the_same_major_version_is_used(self, setup_py: ModuleType, tmp_path: Path) -> None:
        home = fake_toolkit(tmp_path / "cuda", "13.2")
        choice = setup_py.choose_cuda({"CUDA_HOME": str(home)}, "2.14.1", "13.0")
        assert (choice.enabled, choice.home, choice.reason) == (True, home, f"nvcc 13.2 in {home}")

    def test_nvcc_on_path_may_be_a_script_elsewhere(self, setup_py: ModuleType, tmp_path: Path) -> None:
        home = fake_toolkit(tmp_path / "cuda", "13.0")
        (tmp_path / "bin").mkdir()
        shutil.copy(home / "bin" / "nvcc", tmp_path / "bin" / "nvcc")
        assert setup_py.choose_cuda({"PATH": str(tmp_path / "bin")}, "2.14.1", "13.0").home == home

    @pytest.mark.parametrize("forced", ["", "1"])
    def test_other_major_version_of_nvcc_is_an_error(
        self, setup_py: ModuleType, tmp_path: Path, forced: str
    ) -> None:
        home = fake_toolkit(tmp_path / "cuda", "12.4")
        environ = {"CUDA_HOME": str(home), "PAGEDKV_CUDA": forced}
        with pytest.raises(SystemExit) as error:
            setup_py.choose_cuda(environ, "2.14.1", "13.0")
        message = str(error.value)
        assert f"nvcc 12.4 in {home} does not fit torch 2.14.1, which was built with CUDA 13.0" in message
        assert "Set CUDA_HOME to a CUDA 13.x toolkit" in message
        assert "PAGEDKV_CUDA=0" in message

    def test_pagedkv_cuda_0_forces_a_cpu_build(self, setup_py: ModuleType, tmp_path: Path) -> None:
        environ = {"CUDA_HOME": str(fake_toolkit(tmp_path / "cuda", "12.4")), "PAGEDKV_CUDA": "0"}
        choice = setup_py.choose_cuda(environ, "2.14.1", "13.0")
        assert not choice.enabled
        assert "PAGEDKV_CUDA=0" in choice.reason

    @pytest.mark.parametrize("torch_cuda", [None, "13.0"])
    def test_pagedkv_cuda_1_never_falls_back(self, setup_py: ModuleType, torch_cuda: str | None) -> None:
        with pytest.raises(SystemExit, match="PAGEDKV_CUDA=1, but the CUDA back-end cannot be built"):
            setup_py.choose_cuda({"PATH": "", "PAGEDKV_CUDA": "1"}, "2.14.1", torch_cuda)

    def test_other_values_of_pagedkv_cuda_are_refused(self, setup_py: ModuleType) -> None:
        with pytest.raises(SystemExit, match="PAGEDKV_CUDA must be 0 or 1, not 'yes'"):
            setup_py.choose_cuda({"PAGEDKV_CUDA": "yes"}, "2.14.1", "13.0")

    def test_arch_list_of_the_environment_holds(self, setup_py: ModuleType, tmp_path: Path) -> None:
        environ = {"CUDA_HOME": str(fake_toolkit(tmp_path, "13.0")), "TORCH_CUDA_ARCH_LIST": "9.0"}
        assert setup_py.choose_cuda(environ, "2.14.1", "13.0").arch_list == "9.0"

    @pytest.mark.parametrize("nvcc", ["12.6", "12.8", "13.0"])
    def test_fault_no_kernel_image(self, setup_py: ModuleType, nvcc: str) -> None:
        """The default covers every card from A100 on, and those to come by PTX."""
        arch_list = setup_py.default_arch_list(nvcc)
        for capability in [
            (8, 0),
            (8, 6),
            (8, 7),
            (8, 9),
            (9, 0),
            (10, 0),
            (10, 3),
            (11, 0),
            (12, 0),
            (12, 1),
            (13, 0),
        ]:
            assert report.runs_on(capability, arch_list), capability
        assert not report.runs_on((7, 5), arch_list)
        if nvcc == "12.6":  # which knows none newer
            assert "10.0" not in arch_list


class TestPackages:
    """What is built, and what the source distribution holds."""

    def test_build_info_is_a_module_of_four_constants(self, setup_py: ModuleType) -> None:
        namespace: dict[str, object] = {}
        choice = setup_py.CudaChoice(True, "nvcc 13.0 in '/opt/cuda'", Path("/opt/cuda"), "9.0+PTX")
        exec(setup_py.build_info("2.14.1", "13.0", choice), namespace)
        assert {name: namespace[name] for name in namespace if name.isupper()} == {
            "TORCH_VERSION": "2.14.1",
            "CUDA_VERSION": "13.0",
            "CUDA_ARCH_LIST": "9.0+PTX",
            "CUDA_REASON": "nvcc 13.0 in '/opt/cuda'",
        }

    def test_build_info_is_installed_beside_the_extensions(
        self, setup_py: ModuleType, tmp_path: Path
    ) -> None:
        class Compiler(build_ext):
            def run(self) -> None:
                pass

        command_class = setup_py.build_ext_class(
            SimpleNamespace(BuildExtension=Compiler), "2.13.0", "TEXT = 1\n"
        )
        extension = setuptools.Extension("pagedkv._C", [])
        command = command_class(setuptools.Distribution({"name": "pagedkv", "ext_modules": [extension]}))
        command.build_lib, command.build_temp = str(tmp_path), str(tmp_path / "objects")
        (tmp_path / "pagedkv").mkdir()
        command.ensure_finalized()
        command.run()
        path = tmp_path / "pagedkv" / "_build_info.py"
        assert path.read_text() == "TEXT = 1\n"
        assert str(path) in command.get_outputs()

    def test_version_has_one_source(self) -> None:
        assert importlib.metadata.version("pagedkv") == pagedkv.__version__
        latest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
        assert latest is not None
        assert latest.group(1) == pagedkv.__version__

    def test_sdist_holds_what_an_installation_needs(self, tmp_path: Path) -> None:
        built = run_python(
            "-m",
            "build",
            "--sdist",
            "--no-isolation",
            "--outdir",
            str(tmp_path),
            str(ROOT),
            cwd=tmp_path,
            PAGEDKV_CUDA="0",
        )
        assert built.returncode == 0, built.stdout + built.stderr
        with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
            members = archive.getmembers()
        held = {Path(*Path(member.name).parts[1:]).as_posix() for member in members if member.isfile()}
        wanted = {
            "setup.py",
            "pyproject.toml",
            "CMakeLists.txt",
            "Makefile",
            "LICENSE",
            "README.md",
            "CHANGELOG.md",
        }
        for folder in ("csrc", "pagedkv", "tests", "docs", "examples", "benchmarks"):
            for path in (ROOT / folder).rglob("*"):
                generated = path.suffix in (".so", ".pyc") or path.name == "_build_info.py"
                if path.is_file() and not generated and "cache" not in path.parent.name:
                    wanted.add(path.relative_to(ROOT).as_posix())
        assert wanted - held == set()
        assert [name for name in held if name.endswith((".so", "_build_info.py"))] == []


class TestLibraries:
    """The compiled libraries."""

    def needed(self, library: Path) -> set[str]:
        """The libraries that it asks for itself."""
        output = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
        return set(re.findall(r"\(NEEDED\).*\[(.*)\]", output))

    @pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
    def test_libstdcxx_is_shared_with_torch(self, library: Path) -> None:
        """With a copy of its own in the library, errors lose their text or end the process."""
        assert "libstdc++.so.6" in self.needed(library)

    def test_core_needs_no_torch(self) -> None:
        assert [name for name in self.needed(LIBRARIES[0]) if "torch" in name or "c10" in name] == []

    @pytest.mark.skipif(_build_info.CUDA_VERSION is not None, reason="a property of CPU builds")
    @pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
    def test_fault_no_cuda_home(self, library: Path) -> None:
        """A CPU build asks for no CUDA library; where torch has none either, nor does anything it loads."""
        assert [name for name in self.needed(library) if "cuda" in name] == []
        if torch.version.cuda is None:
            loaded = subprocess.run(["ldd", library], capture_output=True, text=True, check=True).stdout
            assert "cuda" not in loaded

    @cuda_build
    def test_cuda_build_has_every_kernel_of_the_sources(self) -> None:
        with_source = {
            path.relative_to(ROOT / "csrc/cuda").parts[0] for path in (ROOT / "csrc/cuda").rglob("*.cu")
        }
        assert {name.removesuffix(".cu") for name in with_source} == _loader.CUDA_OPS
        assert torch._C._dispatch_has_kernel_for_dispatch_key("pagedkv::copy_blocks", "CUDA")

    @cuda_build
    def test_cuda_build_has_the_architectures_it_names(self) -> None:
        wanted = set()
        for entry in _build_info.CUDA_ARCH_LIST.replace(";", " ").split():
            number = entry.removesuffix("+PTX").replace(".", "")
            wanted |= {f"sm_{number}"} | ({f"compute_{number}"} if entry.endswith("+PTX") else set())
        assert device_code(LIBRARIES[1]) == wanted


def device_code(library: Path) -> set[str]:
    """The architectures of the device code in a library: sm_* of machine code, compute_* of PTX.

    Device code lies in fat binaries: a header (magic, version, header size, size), then entries, each with a
    header of its own (kind, flags, header size, payload size, ..., architecture at byte 28).
    """
    data = library.read_bytes()
    found = set()
    for match in re.finditer(re.escape(struct.pack("<IH", 0xBA55ED50, 1)), data):
        header_size, size = struct.unpack_from("<HQ", data, match.start() + 6)
        position = match.start() + header_size
        end = position + size
        while position < end:
            kind, _, entry_header_size, payload_size = struct.unpack_from("<HHIQ", data, position)
            (architecture,) = struct.unpack_from("<I", data, position + 28)
            found.add(f"{ {1: 'compute', 2: 'sm'}[kind] }_{architecture}")
            position += entry_header_size + payload_size
    return found


class TestImport:
    """`import pagedkv` in a wrong environment, and in a right one."""

    def test_other_torch_than_at_build_time_is_an_import_error(self, tmp_path: Path) -> None:
        code = (
            "import sys, types\n"
            "info = types.ModuleType('pagedkv._build_info')\n"
            "info.TORCH_VERSION = '2.0.0'\n"
            "sys.modules['pagedkv._build_info'] = info\n"
            "import pagedkv\n"
        )
        result = run_python("-c", code, cwd=tmp_path)
        assert result.returncode != 0
        assert (
            f"ImportError: pagedkv was built for torch 2.0.0, but this is torch {torch.__version__}"
            in result.stderr
        )
        assert "pip install --no-build-isolation --force-reinstall" in result.stderr

    def test_tree_that_was_not_built_is_an_import_error(self, tmp_path: Path) -> None:
        shutil.copytree(
            ROOT / "pagedkv",
            tmp_path / "pagedkv",
            ignore=shutil.ignore_patterns("_build_info.py", "*.so", "*cache*"),
        )
        # Without the finder of an editable installation, which would look into the installed package too.
        code = (
            "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f)]\n"
            "import pagedkv"
        )
        result = run_python("-c", code, cwd=tmp_path)
        assert result.returncode != 0
        assert "ImportError: pagedkv is not built" in result.stderr
        assert "pip install --no-build-isolation" in result.stderr

    def test_import_leaves_cuda_and_transformers_alone(self, tmp_path: Path) -> None:
        code = (
            "import sys, torch, pagedkv\n"
            "slow = ('transformers', 'torch.utils.cpp_extension')\n"
            "print(torch.cuda.is_initialized(), *(name in sys.modules for name in slow))"
        )
        result = run_python("-c", code, cwd=tmp_path)
        assert result.stdout.split() == ["False", "False", "False"], result.stderr

    @pytest.mark.skipif(_build_info.CUDA_VERSION is not None, reason="a property of CPU builds")
    @pytest.mark.parametrize("op", _loader._OPS)
    def test_operator_without_cuda_kernel_says_what_to_do(self, op: str) -> None:
        with FakeTensorMode(allow_non_fake_inputs=True):
            tensor = torch.empty(1, 1, 1, 8, device="cuda")
            with pytest.raises(NotImplementedError, match=op) as error:
                ops._require_backend(op, tensor)
        assert re.search("built without CUDA: .*(install|set)", str(error.value))


class TestReport:
    """`python -m pagedkv`."""

    def test_report_names_versions_and_back_ends(self, tmp_path: Path) -> None:
        result = run_python("-m", "pagedkv", cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        lines = dict(
            line.split(maxsplit=1) for line in result.stdout.splitlines() if not line.startswith(" ")
        )
        assert list(lines) == ["pagedkv", "torch", "Python", "CPU", "CUDA", "transformers"]
        assert lines["pagedkv"] == pagedkv.__version__
        assert lines["torch"].startswith(torch.__version__)
        assert lines["CPU"].startswith("yes")
        assert lines["CUDA"].startswith("built with" if _build_info.CUDA_VERSION else "not built: ")

    def test_missing_device_and_missing_architecture_come_with_a_remedy(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(_build_info, "CUDA_VERSION", "13.0")
        monkeypatch.setattr(_build_info, "CUDA_ARCH_LIST", "8.0;9.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert "nvidia-smi" in report.describe_cuda()[-1]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"card {index}")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: [(9, 0), (12, 0)][index])
        covered, not_covered = report.describe_cuda()[-2:]
        assert covered == "device 0: card 0, architecture 9.0"
        assert "device 1: card 1, architecture 12.0, not covered" in not_covered
        assert "TORCH_CUDA_ARCH_LIST=12.0" in not_covered

    def test_missing_and_old_transformers_come_with_a_remedy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing(name: str) -> str:
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(importlib.metadata, "version", missing)
        assert report.describe_transformers() == ["not installed: pip install 'transformers>=5.24'"]
        monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.57.1")
        assert report.describe_transformers() == ["4.57.1 is too old: pip install 'transformers>=5.24'"]

    @pytest.mark.parametrize(
        ("capability", "arch_list", "expected"),
        [
            ((8, 6), "8.0", True),
            ((8, 0), "8.6", False),
            ((9, 0), "8.0", False),
            ((9, 0), "8.0+PTX", True),
            ((8, 0), "9.0+PTX", False),
            ((9, 0), "9.0a", True),
            ((9, 1), "9.0a", False),
            ((12, 1), "8.0 10.0;12.0", True),
        ],
    )
    def test_which_code_runs_on_which_card(
        self, capability: tuple[int, int], arch_list: str, expected: bool
    ) -> None:
        assert report.runs_on(capability, arch_list) is expected
