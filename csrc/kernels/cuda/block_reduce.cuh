// SPDX-License-Identifier: BSD-3-Clause
// Sums of NormPartials over a warp or a block, in an order that depends on thread numbers alone:
// the same bits on every run.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/shared.h"
#include "kernels/cuda/launch_table.cuh"
#include "kernels/functors/l2_norm.h"
#include "kernels/layerwise_optimizer.h"

namespace torchfuse::kernels::cuda {

/// Lane 0 gets the sum over its warp; the other lanes get partial sums of no use.
__device__ __forceinline__ NormPartial warp_sum(NormPartial value) {
#pragma unroll
  for (unsigned distance = kWarpThreads / 2; distance > 0; distance /= 2) {
    NormPartial other;
    other.small = __shfl_down_sync(0xffffffffu, value.small, distance);
    other.big = __shfl_down_sync(0xffffffffu, value.big, distance);
    // Flags are 0 or 1: the low half holds all of them.
    other.nonfinite =
        __shfl_down_sync(0xffffffffu, static_cast<unsigned>(value.nonfinite), distance);
    value = value + other;
  }
  return value;
}

__device__ __forceinline__ MeasurePartial warp_sum(MeasurePartial value) {
  value.sums = warp_sum(value.sums);
#pragma unroll
  for (unsigned distance = kWarpThreads / 2; distance > 0; distance /= 2) {
    value.largest =
        kernels::max(value.largest, __shfl_down_sync(0xffffffffu, value.largest, distance));
  }
  return value;
}

template <class Partial>
struct BlockSumShared {
  Partial warps[kWarps];
};

/// Thread 0 gets the sum over the block. All threads must call it, and pass a barrier before they
/// call it again: the earlier sum may still be read.
template <class Partial>
__device__ __forceinline__ Partial block_sum(Partial value) {
  BlockSumShared<Partial>& shared = block_shared<BlockSumShared<Partial>>();
  value = warp_sum(value);
  if (threadIdx.x % kWarpThreads == 0) shared.warps[threadIdx.x / kWarpThreads] = value;
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (std::uint32_t warp = 1; warp < kWarps; ++warp) value = value + shared.warps[warp];
  }
  return value;
}

/// Thread 0 gets the sum of `count` partials: each thread adds every 256th in order, then the
/// block's threads are added.
__device__ __forceinline__ NormPartial sum_partials(const NormPartial* partials,
                                                    std::int64_t count) {
  NormPartial sum{0.0, 0.0, 0};
#pragma unroll 4
  for (std::int64_t i = threadIdx.x; i < count; i += kThreads) sum = sum + partials[i];
  return block_sum(sum);
}

}  // namespace torchfuse::kernels::cuda
