// SPDX-License-Identifier: BSD-3-Clause
// What the kernels' source sees of CUDA when g++ compiles it: this file stands in for the toolkit's
// <cuda_runtime.h>. Behavior is in engine.h, the rules are in ../README.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#include "../engine.h"

// --- Keywords ------------------------------------------------------------------------------------

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
/// Behind the type: threads share the argument and do not copy it.
#define __grid_constant__ &
#define __launch_bounds__(...)

// --- Types and built-in variables ----------------------------------------------------------------

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// One-dimensional launches only: engine.h refuses others, so .y and .z are constants.
struct BuiltInIndex {
  unsigned x;
  static constexpr unsigned y = 0, z = 0;
};
struct BuiltInSize {
  unsigned x;
  static constexpr unsigned y = 1, z = 1;
};
#define threadIdx (BuiltInIndex{::cuda_on_cpu::running.thread})
#define blockIdx (BuiltInIndex{::cuda_on_cpu::running.block})
#define blockDim (BuiltInSize{::cuda_on_cpu::running.threads_per_block})
#define gridDim (BuiltInSize{::cuda_on_cpu::running.blocks})

// --- Barriers and shuffles -----------------------------------------------------------------------

inline void __syncthreads() { ::cuda_on_cpu::block_barrier("__syncthreads", 0); }
inline int __syncthreads_or(int predicate) {
  return ::cuda_on_cpu::block_barrier("__syncthreads_or", predicate != 0) != 0;
}
inline void __syncwarp(unsigned mask = 0xffffffffu) { ::cuda_on_cpu::warp_barrier(mask); }

namespace cuda_on_cpu {

/// The value of lane `source`; `in_segment` false: the calling lane keeps its own.
template <class T>
T shuffle(const char* what, unsigned mask, T value, unsigned source, bool in_segment) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  const std::uint64_t* values = warp_exchange(what, mask, bits);
  if (!in_segment) return value;
  require_lane(what, mask, source);
  T result;
  std::memcpy(&result, &values[source], sizeof result);
  return result;
}

}  // namespace cuda_on_cpu

template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  const unsigned self = threadIdx.x % 32, segment = static_cast<unsigned>(width);
  const unsigned source = self / segment * segment + static_cast<unsigned>(lane) % segment;
  return ::cuda_on_cpu::shuffle("__shfl_sync", mask, value, source, true);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const unsigned self = threadIdx.x % 32, segment = static_cast<unsigned>(width);
  return ::cuda_on_cpu::shuffle("__shfl_down_sync", mask, value, self + delta,
                                self % segment + delta < segment);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
  const unsigned self = threadIdx.x % 32, segment = static_cast<unsigned>(width);
  const unsigned source = self ^ static_cast<unsigned>(lanes);
  return ::cuda_on_cpu::shuffle("__shfl_xor_sync", mask, value, source,
                                source / segment <= self / segment);
}

// --- Memory accesses with a cache hint -----------------------------------------------------------

template <class T>
T __ldcs(const T* address) {
  ::cuda_on_cpu::require_aligned(address, alignof(T) < sizeof(T) ? sizeof(T) : alignof(T));
  return *address;
}
template <class T>
void __stcs(T* address, T value) {
  ::cuda_on_cpu::require_aligned(address, alignof(T) < sizeof(T) ? sizeof(T) : alignof(T));
  *address = value;
}

// --- The runtime's functions ---------------------------------------------------------------------

using cudaStream_t = struct CUstream_st*;
enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorLaunchFailure = 719,
};

/// A launch owns its arguments, as on a device: who gets it may run it later. An error is what a
/// device would refuse, or, where the grid runs at once, a kernel that goes wrong in a way that can
/// be told;
/// ::cuda_on_cpu::last_fault() has the words.
template <class... Parameters>
cudaError_t cudaLaunchKernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, void** arguments,
                             std::size_t shared_bytes = 0, cudaStream_t stream = nullptr) {
  const auto bind = [&]<std::size_t... kIndex>(std::index_sequence<kIndex...>) {
    using Values = std::tuple<std::remove_cvref_t<Parameters>...>;
    return [kernel, values = Values(*static_cast<const std::remove_cvref_t<Parameters>*>(
                        arguments[kIndex])...)] { std::apply(kernel, values); };
  };
  ::cuda_on_cpu::LaunchShape shape;
  shape.grid[0] = grid.x, shape.grid[1] = grid.y, shape.grid[2] = grid.z;
  shape.block[0] = block.x, shape.block[1] = block.y, shape.block[2] = block.z;
  shape.argument_bytes = (sizeof(Parameters) + ... + 0);
  shape.shared_bytes = shared_bytes;
  return static_cast<cudaError_t>(
      ::cuda_on_cpu::launch(stream, shape, bind(std::index_sequence_for<Parameters...>{})));
}

/// The error of the last launch, which is then forgotten.
inline cudaError_t cudaGetLastError() {
  return static_cast<cudaError_t>(::cuda_on_cpu::take_last_error());
}
