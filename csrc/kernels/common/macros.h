// SPDX-License-Identifier: BSD-3-Clause
// Lets g++ and nvcc share functions.
#pragma once

// Functions marked HOST_DEVICE are forced inline on the host. The CPU kernels are compiled once per
// instruction level. If the linker found out-of-line copies, it might keep an AVX-512 copy for all
// levels: see Note [One object per instruction level] in cpu/isa.h.
#if defined(__CUDACC__)
#define TORCHFUSE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define TORCHFUSE_HOST_DEVICE inline __attribute__((always_inline))
#endif
