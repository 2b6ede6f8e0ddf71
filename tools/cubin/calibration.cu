// SPDX-License-Identifier: BSD-3-Clause
// Kernels whose machine code is known in advance: calibration.py says what must be found in them.
// None of them is ever run.
#include <cuda_runtime.h>

template <class T>
__device__ __forceinline__ void copy(const T* from, T* to) {
  to[threadIdx.x] = from[threadIdx.x];
}

extern "C" __global__ void access_128(const uint4* from, uint4* to) { copy(from, to); }
extern "C" __global__ void access_64(const uint2* from, uint2* to) { copy(from, to); }
extern "C" __global__ void access_32(const unsigned* from, unsigned* to) { copy(from, to); }
extern "C" __global__ void access_16(const unsigned short* from, unsigned short* to) {
  copy(from, to);
}

// Registers have no index: the array must lie in local memory.
extern "C" __global__ void local_array(const unsigned* from, unsigned* to) {
  unsigned values[64] = {};
  for (unsigned i = 0; i < 64; ++i) values[from[i] % 64] = i;
  to[threadIdx.x] = values[threadIdx.x % 64];
}

// 64 values are alive at the barrier, where 40 registers are left to a thread.
extern "C" __global__ void __launch_bounds__(768, 2) spills(const unsigned* from, unsigned* to) {
  unsigned values[64];
#pragma unroll
  for (unsigned i = 0; i < 64; ++i) values[i] = from[768 * i + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (unsigned i = 0; i < 64; ++i) to[768 * (63 - i) + threadIdx.x] = values[i];
}

extern "C" __global__ void __launch_bounds__(256, 3) static_shared(unsigned* to) {
  __shared__ unsigned values[257];
  values[threadIdx.x] = to[threadIdx.x];
  if (threadIdx.x == 0) values[256] = 0;
  __syncthreads();
  to[threadIdx.x] = values[256 - threadIdx.x];
}

struct Arguments {
  unsigned values[8000];
  unsigned* to;
};

extern "C" __global__ void arguments(const __grid_constant__ Arguments block) {
  block.to[threadIdx.x] = block.values[threadIdx.x];
}
