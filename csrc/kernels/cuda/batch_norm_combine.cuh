// SPDX-License-Identifier: BSD-3-Clause
// Combines threads' sums into channel sums: within warps, within blocks, and over a tile's slices
// in the tile's last block. The order depends only on thread and slice numbers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "kernels/common/atomic.h"
#include "kernels/common/shared.h"
#include "kernels/cuda/batch_norm_walk.cuh"

namespace torchfuse::kernels::cuda {

/// Sums of dy and dy * (x - center).
struct DeviationSums {
  double dy = 0.0;
  double dy_deviation = 0.0;
};
__device__ __forceinline__ DeviationSums merge(const DeviationSums& a, const DeviationSums& b) {
  return DeviationSums{a.dy + b.dy, a.dy_deviation + b.dy_deviation};
}

/// A partial is a plain struct of doubles.
template <class Partial>
constexpr int kFields = static_cast<int>(sizeof(Partial) / sizeof(double));

template <class Partial>
struct TileShared {
  alignas(16) double fields[kFields<Partial>][kGridWarps][kSumTileChannels];
};

template <class Partial>
__device__ __forceinline__ Partial shuffle_down(const Partial& value, unsigned distance) {
  double fields[kFields<Partial>];
  memcpy(fields, &value, sizeof value);
#pragma unroll
  for (double& field : fields) field = __shfl_down_sync(0xffffffffu, field, distance);
  Partial other;
  memcpy(&other, fields, sizeof other);
  return other;
}

/// Adds TileShared over the block's warps and returns, in thread i < `tile_channels`, the sum for
/// the tile's channel i. All threads must call it, and pass a barrier before TileShared is written
/// again.
template <class Partial>
__device__ __forceinline__ Partial sum_of_warps(std::uint32_t tile_channels) {
  const auto& shared = block_shared<TileShared<Partial>>();
  __syncthreads();
  Partial sum{};
  if (threadIdx.x < tile_channels) {
#pragma unroll 1
    for (std::uint32_t warp = 0; warp < kGridWarps; ++warp) {
      double fields[kFields<Partial>];
#pragma unroll
      for (int f = 0; f < kFields<Partial>; ++f) fields[f] = shared.fields[f][warp][threadIdx.x];
      Partial other;
      memcpy(&other, fields, sizeof other);
      sum = merge(sum, other);
    }
  }
  return sum;
}

/// Adds over the block. Every thread passes a value for its column's channel; see Note [Windows].
/// Returns sums in the same threads as sum_of_warps(), with the same rules for calls.
template <class Partial>
__device__ __forceinline__ Partial tile_sum(Partial value, std::uint32_t lanes,
                                            std::uint32_t columns) {
  const auto row_threads = lanes * columns;
#pragma unroll 1
  for (std::uint32_t d = kWarp / 2; d >= row_threads; d /= 2) {
    value = merge(value, shuffle_down(value, d));
  }
#pragma unroll 1
  for (std::uint32_t d = lanes / 2; d > 0; d /= 2) value = merge(value, shuffle_down(value, d));

  const std::uint32_t in_warp = threadIdx.x % kWarp;
  if (in_warp < row_threads && in_warp % lanes == 0) {
    auto& shared = block_shared<TileShared<Partial>>();
    double fields[kFields<Partial>];
    memcpy(fields, &value, sizeof fields);
#pragma unroll
    for (int f = 0; f < kFields<Partial>; ++f) {
      shared.fields[f][threadIdx.x / kWarp][in_warp / lanes] = fields[f];
    }
  }
  return sum_of_warps<Partial>(columns);
}

struct ArrivalShared {
  bool last;
};

/// Returns whether the calling block arrives last of `blocks`, and then resets the counter to zero.
/// See Note [Hand-over between blocks].
__device__ __forceinline__ bool last_to_arrive(std::uint32_t* counter, std::uint32_t blocks) {
  ArrivalShared& shared = block_shared<ArrivalShared>();
  __syncthreads();
  if (threadIdx.x == 0) {
    shared.last = fetch_add_acq_rel(counter, 1) == blocks - 1;
    if (shared.last) *counter = 0;
  }
  __syncthreads();
  return shared.last;
}

/// Returns where slice `s` stores field `f` for channel `c`. A tile's channels are contiguous.
template <class Partial>
__device__ __forceinline__ double* partial_field(double* partials, std::int64_t channels,
                                                 std::int64_t s, int f, std::int64_t c) {
  return partials + (s * kFields<Partial> + f) * channels + c;
}

template <class Partial>
struct ChannelTotal {
  std::int64_t channel;  ///< negative if the calling thread has none
  Partial total;
};

/// Returns complete channel sums, one per thread, in each tile's last block to arrive. `block_sum`
/// is the block's sum for the calling thread's channel.
template <class Partial, class S, class Layout>
__device__ __forceinline__ ChannelTotal<Partial> total_of_slices(const BatchNormGrid& grid,
                                                                 const GridPlace<S, Layout>& at,
                                                                 const Partial& block_sum,
                                                                 double* partials,
                                                                 std::uint32_t* arrivals) {
  const std::uint32_t tile_channels = grid.columns * at.kChannels;
  const std::uint32_t place = threadIdx.x % tile_channels;
  const std::int64_t channel = at.tile * tile_channels + place;
  const bool exists = channel < grid.channels;
  const bool represents = threadIdx.x == place && exists;
  const std::int64_t none = -1;
  if (grid.slices == 1) return {represents ? channel : none, block_sum};
  if (represents) {
    double fields[kFields<Partial>];
    memcpy(fields, &block_sum, sizeof fields);
#pragma unroll
    for (int f = 0; f < kFields<Partial>; ++f) {
      *partial_field<Partial>(partials, grid.channels, at.slice, f, channel) = fields[f];
    }
  }
  const auto slices = static_cast<std::uint32_t>(grid.slices);
  if (!last_to_arrive(arrivals + at.tile, slices)) return {none, {}};

  Partial total{};
  if (exists) {
#pragma unroll 4
    for (std::uint32_t s = threadIdx.x / tile_channels; s < slices;
         s += kGridThreads / tile_channels) {
      double fields[kFields<Partial>];
#pragma unroll
      for (int f = 0; f < kFields<Partial>; ++f) {
        fields[f] = *partial_field<Partial>(partials, grid.channels, s, f, channel);
      }
      Partial other;
      memcpy(&other, fields, sizeof other);
      total = merge(total, other);
    }
  }
  return {represents ? channel : none, tile_sum(total, 1, tile_channels)};
}

}  // namespace torchfuse::kernels::cuda
