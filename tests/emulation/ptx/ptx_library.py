"""Kernels written in PTX by a test, translated and made into one library."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch
from emulation import build as emulated

from . import build, parser, translator

HEADER = """\
.version 9.0
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 shared[];
.const .align 2 .u16 table[32] = {7, 0, 0x10};
.func (.param .b32 result) square(.param .b32 x)
{
  .reg .b32 %r<3>;
  ld.param.u32 %r1, [x];
  mul.lo.s32 %r2, %r1, %r1;
  st.param.b32 [result+0], %r2;
  ret;
}
"""


def entry(name: str, body: str) -> str:
    """A kernel of (out, in)."""
    return (
        f".visible .entry {name}(.param .align 8 .b8 params[16])\n.maxntid 32, 1, 1\n{{\n"
        "  .reg .b64 %out, %in;\n  ld.param.u64 %out, [params];\n  ld.param.u64 %in, [params+8];\n"
        f"{body}\n  ret;\n}}\n"
    )


RUNNER = """
namespace pagedkv::emulator::ptx {{
{declarations}
using Body = void (*)(const unsigned char*);
constexpr Body BODIES[] = {{{names}}};
extern "C" __attribute__((visibility("default"))) const char* run_ptx(int idx, unsigned num_threads,
                                                                      void* out, const void* in) {{
  const void* params[] = {{out, in}};
  const auto* bytes = reinterpret_cast<const unsigned char*>(params);
  const cudaError_t error = run_grid({{1, num_threads, 1024}}, [&] {{ BODIES[idx](bytes); }});
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
}}
}}  // namespace pagedkv::emulator::ptx
"""


class Library:
    """Kernels, by name, compiled into one library."""

    def __init__(self, kernels: Mapping[str, str]) -> None:
        """Translate and compile, unless a library of the same kernels lies there from before."""
        from torch.utils import cpp_extension

        self._names = list(kernels)
        module = parser.parse(HEADER + "".join(kernels.values()), "test.ptx")
        functions = {f"ptx_{function.name}": function for function in module.entries}
        text = translator.translate(module, functions, "test.ptx")
        declarations = "\n".join(f"void {name}(const unsigned char*);" for name in functions)
        text += RUNNER.format(declarations=declarations, names=", ".join(functions))
        directory = emulated.ROOT / "build" / "ptx-instructions" / f"torch-{torch.__version__}"
        directory.mkdir(parents=True, exist_ok=True)
        with emulated.exclusive(directory):
            emulated.find_ninja()
            kernel_file = build.write_if_different(directory / "kernels.cpp", text)
            sources = [kernel_file, build.HERE / "machine.cpp", *emulated.emulator_files()]
            cpp_extension.load(
                name="pagedkv_ptx_instructions",
                sources=[str(path) for path in sources],
                extra_include_paths=[str(path) for path in (emulated.CSRC, emulated.EMULATOR, build.HERE)],
                extra_cflags=build.FLAGS,
                build_directory=str(directory),
                is_python_module=False,
            )
        self._run = ctypes.CDLL(str(directory / "pagedkv_ptx_instructions.so")).run_ptx
        self._run.restype = ctypes.c_char_p

    def run(self, name: str, num_threads: int, values: list[int]) -> tuple[torch.Tensor, str]:
        """The 64 words of 32 bits that a kernel writes to, given 64-bit values, and the text of its fault."""
        out = torch.zeros(64, dtype=torch.int32)
        source = torch.tensor([signed(value, 64) for value in values] + [0, 0], dtype=torch.int64)
        pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (out, source))
        error = self._run(self._names.index(name), num_threads, *pointers)
        return out, error.decode()


def signed(value: int, bits: int) -> int:
    """A number modulo 2 ** bits, as two's complement has it."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value
