// SPDX-License-Identifier: BSD-3-Clause
// Compiled once for every feature that the emulation lacks: each must be refused by its name.
#include <cuda_runtime.h>

__global__ void kernel(unsigned* counter) {
#if defined(USES_SHARED)
  __shared__ unsigned value;
  *counter = value;
#elif defined(USES_THREADFENCE)
  __threadfence();
#elif defined(USES_ATOMIC_ADD)
  atomicAdd(counter, 1u);
#elif defined(USES_ACTIVEMASK)
  *counter = __activemask();
#elif defined(USES_NANOSLEEP)
  __nanosleep(100);
#endif
  *counter = threadIdx.x;
}

#if defined(USES_CONSTANT)
__constant__ int table[4];
#elif defined(USES_MANAGED)
__managed__ int table[4];
#endif
