// Which kernels were launched, for those who count them: `make emulated`, `make budgets`.
#pragma once

#include "emulator.h"

namespace pagedkv::emulator {

// Appends a line to the file that the environment's PAGEDKV_EMULATOR_LAUNCHES names, once per process for a
// kernel, size of CTA and size of shared memory:
//
//   source <executable or library> <offset of the kernel in it, hexadecimal> <threads> <shared bytes>
void record_launch(const void* kernel, const LaunchShape& shape);

// The same of a kernel that runs in another form:
//
//   ptx_<architecture> <mangled name>
void record_replacement(const Replacement& replacement);

}  // namespace pagedkv::emulator
