// SPDX-License-Identifier: BSD-3-Clause
// What blocks of one launch may share: arrival counters and one flag, nothing else.
//
// Note [Hand-over between blocks]
// Results pass from one block to another only through `fetch_add_acq_rel`: the writer's stores come
// before its arrival (release), the reader's loads after it has seen all arrivals (acquire), and
// __syncthreads() extends both to the other threads of the block. One operation carries the whole
// ordering, so leaving it out is an error that a race detector can see when the kernels run on a
// CPU; a relaxed atomic with a fence beside it is not.
#pragma once

#include <cstdint>

#if !defined(__CUDACC__)
#include <atomic>
#endif

namespace torchfuse::kernels {

#if defined(__CUDACC__)

/// Adds `value` and returns the former content.
__device__ __forceinline__ std::uint32_t fetch_add_acq_rel(std::uint32_t* counter,
                                                           std::uint32_t value) {
  std::uint32_t former;
  asm volatile("atom.acq_rel.gpu.add.u32 %0, [%1], %2;"
               : "=r"(former)
               : "l"(counter), "r"(value)
               : "memory");
  return former;
}

/// Sets a flag that any number of threads may set, and that is read by later launches only.
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
