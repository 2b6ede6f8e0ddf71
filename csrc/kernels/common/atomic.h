// SPDX-License-Identifier: BSD-3-Clause
// Blocks of one launch share only arrival counters and one flag.
//
// Note [Hand-over between blocks]
// Blocks pass results to each other only through `fetch_add_acq_rel`. The writer's stores come
// before the writer's arrival (release). The reader's loads come after the reader has seen all
// arrivals (acquire). __syncthreads() extends both orderings to the block's other threads.
// fetch_add_acq_rel is the only source of ordering, so a race detector notices a missing call when
// the kernels run on a CPU. A race detector would not notice a missing fence next to a relaxed
// atomic.
#pragma once

#include <cstdint>

#if !defined(__CUDACC__)
#include <atomic>
#endif

namespace torchfuse::kernels {

#if defined(__CUDACC__)

/// Adds `value` and returns the former value.
__device__ __forceinline__ std::uint32_t fetch_add_acq_rel(std::uint32_t* counter,
                                                           std::uint32_t value) {
  std::uint32_t former;
  asm volatile("atom.acq_rel.gpu.add.u32 %0, [%1], %2;"
               : "=r"(former)
               : "l"(counter), "r"(value)
               : "memory");
  return former;
}

/// Sets a flag. Any number of threads may set the flag, and only later launches read the flag.
__device__ __forceinline__ void raise_flag(float* flag) { *flag = 1.0f; }

#else

inline std::uint32_t fetch_add_acq_rel(std::uint32_t* counter, std::uint32_t value) {
  return std::atomic_ref<std::uint32_t>(*counter).fetch_add(value, std::memory_order_acq_rel);
}

inline void raise_flag(float* flag) {
  std::atomic_ref<float>(*flag).store(1.0f, std::memory_order_relaxed);
}

#endif

}  // namespace torchfuse::kernels
