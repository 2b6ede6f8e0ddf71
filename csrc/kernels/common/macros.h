// SPDX-License-Identifier: BSD-3-Clause
// Lets g++ and nvcc share functions.
#pragma once

// Functions marked HOST_DEVICE are forced inline on the host. The CPU kernels are compiled once per
// instruction level, and the linker must never keep an out-of-line copy built with AVX-512 for all
// levels (see Note [One object per instruction level] in cpu/isa.h).
#if defined(__CUDACC__)
#define TORCHFUSE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define TORCHFUSE_HOST_DEVICE inline __attribute__((always_inline))
#endif
