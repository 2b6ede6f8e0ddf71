// SPDX-License-Identifier: BSD-3-Clause
// How a function is shared between g++ and nvcc.
#pragma once

// Functions marked HOST_DEVICE are forced inline on the host: the CPU kernels are compiled once per
// instruction level, and an out-of-line copy built with AVX-512 must never be the one that the
// linker keeps for everybody (see Note [One object per instruction level] in cpu/isa.h).
#if defined(__CUDACC__)
#define TORCHFUSE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define TORCHFUSE_HOST_DEVICE inline __attribute__((always_inline))
#endif
