// "Host CUDA": lets a kernel file compile with a plain C++ compiler and run on CPU threads. Device code
// includes it through csrc/common/device.h; it needs no CUDA toolkit.
#pragma once

#if defined(__CUDACC__)
#error "host_cuda.h is for host compilers: nvcc has the real CUDA"
#endif

#include "async_copy.h"
#include "cuda_types.h"
#include "device_functions.h"
#include "emulator.h"
#include "host_runtime.h"
#include "matrix_ops.h"

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(num_bytes) __attribute__((aligned(num_bytes)))
// A static __shared__ variable would be one for all CTAs, without poison and without bounds. (__noinline__
// stays itself: libstdc++ spells an attribute that way.)
#define __shared__ static_shared_memory_is_not_supported_use_PAGEDKV_SHARED

#define threadIdx (::pagedkv::emulator::current_thread->thread_idx)
#define blockIdx (::pagedkv::emulator::current_thread->cta->block_idx)
#define blockDim (::pagedkv::emulator::current_thread->cta->cta_dim)
#define gridDim (::pagedkv::emulator::current_thread->cta->grid_dim)

inline constexpr int warpSize = 32;
