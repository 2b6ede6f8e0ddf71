// SPDX-License-Identifier: BSD-3-Clause
// Sums NormPartials over a warp or a block. The order depends only on thread numbers, so results
// are bit-identical in every run.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/shared.h"
#include "kernels/cuda/launch_table.cuh"
#include "kernels/functors/l2_norm.h"
#include "kernels/layerwise_optimizer.h"

namespace torchfuse::kernels::cuda {

/// Returns the warp's sum in lane 0. Results in other lanes are meaningless.
__device__ __forceinline__ NormPartial warp_sum(NormPartial value) {
#pragma unroll
  for (unsigned distance = kWarpThreads / 2; distance > 0; distance /= 2) {
    NormPartial other;
    other.small = __shfl_down_sync(0xffffffffu, value.small, distance);
    other.big = __shfl_down_sync(0xffffffffu, value.big, distance);
    // Flags are 0 or 1, so the low half is enough.
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

/// Returns the block's sum in thread 0. All threads must call this function, and must pass a
/// barrier before the next call, because the earlier sum may still be read.
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

/// Returns the sum of `count` partials in thread 0. Each thread adds every 256th partial in order,
/// and then the threads' sums are added.
__device__ __forceinline__ NormPartial sum_partials(const NormPartial* partials,
                                                    std::int64_t count) {
  NormPartial sum{0.0, 0.0, 0};
#pragma unroll 4
  for (std::int64_t i = threadIdx.x; i < count; i += kThreads) sum = sum + partials[i];
  return block_sum(sum);
}

}  // namespace torchfuse::kernels::cuda
