// SPDX-License-Identifier: BSD-3-Clause
// From the sums of threads to the sums of channels: lanes, rows, then the slices of a tile, which
// its last block adds. The order depends on thread and slice numbers alone.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "kernels/common/atomic.h"
#include "kernels/common/shared.h"
#include "kernels/cuda/batch_norm_walk.cuh"

namespace torchfuse::kernels::cuda {

/// Sums of dy and of dy * (x - center).
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

template <class Partial, int kChannels>
struct CombineShared {
  double fields[kChannels][kFields<Partial>][kGridThreads / 2];
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

/// Row 0 of each column gets the column's sum. All threads must call it, and pass a barrier before.
template <class Partial, int kChannels>
__device__ __forceinline__ void merge_rows(Partial (&values)[kChannels], std::uint32_t column,
                                           std::uint32_t columns, std::uint32_t row,
                                           std::uint32_t rows, bool takes_part) {
  auto& shared = block_shared<CombineShared<Partial, kChannels>>();
#pragma unroll 1
  for (std::uint32_t half = rows / 2; half > 0; half /= 2) {
    const std::uint32_t slot = row % half * columns + column;
    if (takes_part && row >= half && row < 2 * half) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        double fields[kFields<Partial>];
        memcpy(fields, &values[c], sizeof fields);
#pragma unroll
        for (int f = 0; f < kFields<Partial>; ++f) shared.fields[c][f][slot] = fields[f];
      }
    }
    __syncthreads();
    if (takes_part && row < half) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        double fields[kFields<Partial>];
#pragma unroll
        for (int f = 0; f < kFields<Partial>; ++f) fields[f] = shared.fields[c][f][slot];
        Partial other;
        memcpy(&other, fields, sizeof other);
        values[c] = merge(values[c], other);
      }
    }
    __syncthreads();
  }
}

struct ArrivalShared {
  bool last;
};

/// Whether the calling block is the last of `blocks` to come here. The counter is then zero again.
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

/// Field `f` of the partial of slice `s`, for channel `c`: the channels of a tile lie together.
template <class Partial>
__device__ __forceinline__ double* partial_field(double* partials, std::int64_t channels,
                                                 std::int64_t s, int f, std::int64_t c) {
  return partials + (s * kFields<Partial> + f) * channels + c;
}

template <class Partial>
struct ChannelTotal {
  std::int64_t channel;  ///< negative: the calling thread has none
  Partial total;
};

/// The sums of whole channels, in the last block of each tile to come here, one per thread.
template <class Partial, class S, class Layout, int kChannels>
__device__ __forceinline__ ChannelTotal<Partial> total_of_slices(
    const BatchNormGrid& grid, const WindowCursor<S, Layout>& cursor, Partial (&values)[kChannels],
    double* partials, std::uint32_t* arrivals) {
  if constexpr (kChannels == 1) {
#pragma unroll 1
    for (std::uint32_t distance = grid.lanes / 2; distance > 0; distance /= 2) {
      values[0] = merge(values[0], shuffle_down(values[0], distance));
    }
  }
  merge_rows(values, cursor.column, grid.columns, cursor.rank, grid.rows, cursor.lane == 0);
  if (cursor.lane == 0 && cursor.rank == 0) {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      if (cursor.channel + c >= grid.channels) continue;
      double fields[kFields<Partial>];
      memcpy(fields, &values[c], sizeof fields);
#pragma unroll
      for (int f = 0; f < kFields<Partial>; ++f) {
        *partial_field<Partial>(partials, grid.channels, cursor.slice, f, cursor.channel + c) =
            fields[f];
      }
    }
  }
  ChannelTotal<Partial> result{-1, {}};
  const auto slices = static_cast<std::uint32_t>(grid.slices);
  if (!last_to_arrive(arrivals + cursor.tile, slices)) return result;

  const std::uint32_t tile_channels = grid.columns * kChannels;
  const std::uint32_t teams = kGridThreads / tile_channels;
  const std::uint32_t place = threadIdx.x % tile_channels;
  const std::uint32_t team = threadIdx.x / tile_channels;
  const std::int64_t channel = cursor.tile * tile_channels + place;
  Partial total[1] = {};
  if (channel < grid.channels) {
#pragma unroll 4
    for (std::uint32_t s = team; s < slices; s += teams) {
      double fields[kFields<Partial>];
#pragma unroll
      for (int f = 0; f < kFields<Partial>; ++f) {
        fields[f] = *partial_field<Partial>(partials, grid.channels, s, f, channel);
      }
      Partial other;
      memcpy(&other, fields, sizeof other);
      total[0] = merge(total[0], other);
    }
  }
  merge_rows(total, place, tile_channels, team, teams, true);
  if (team == 0 && channel < grid.channels) result = {channel, total[0]};
  return result;
}

}  // namespace torchfuse::kernels::cuda
