// SPDX-License-Identifier: BSD-3-Clause
// The kernels of batch normalization: statistics, then the output.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/batch_norm.h"
#include "kernels/cuda/batch_norm_row_sums.cuh"

namespace torchfuse::kernels::cuda {

/// The terms of a tile's channels: each of their numbers, of type T, for the columns side by side.
/// A tile is at most a warp wide.
template <class T, class Terms, int kChannels>
struct TermsShared {
  static constexpr int kNumbers = static_cast<int>(sizeof(Terms) / sizeof(T));
  T numbers[kNumbers][kChannels][kWarp];
};

/// The terms of the calling thread's channels. One channel's are kept in registers. Those of a row
/// would take up to 48 of them, so they are read again for each window.
template <class T, class Terms, class Cursor>
class ChannelTerms {
 public:
  static constexpr int kChannels = Cursor::kChannels;
  using Shared = TermsShared<T, Terms, kChannels>;

  /// Takes terms_of(channel) for the tile's channels. All threads of the block must come here.
  template <class TermsOf>
  __device__ __forceinline__ ChannelTerms(const BatchNormGrid& grid, const Cursor& cursor,
                                          const TermsOf& terms_of)
      : column_(cursor.column) {
    const std::int64_t first = cursor.tile * grid.columns * kChannels;
    if (threadIdx.x < grid.columns * kChannels && first + threadIdx.x < grid.channels) {
      const Terms terms = terms_of(first + threadIdx.x);
      T numbers[Shared::kNumbers];
      memcpy(numbers, &terms, sizeof terms);
#pragma unroll
      for (int n = 0; n < Shared::kNumbers; ++n) {
        shared().numbers[n][threadIdx.x % kChannels][threadIdx.x / kChannels] = numbers[n];
      }
    }
    __syncthreads();
    if constexpr (kChannels == 1) own_ = read(0);
  }

  /// Ahead of each window: what was read for the one before is not kept.
  __device__ __forceinline__ void begin_window() const {
    if constexpr (kChannels > 1) asm volatile("" ::: "memory");
  }

  __device__ __forceinline__ Terms of(int channel) const {
    if constexpr (kChannels == 1) return own_;
    return read(channel);
  }

 private:
  __device__ __forceinline__ static Shared& shared() { return block_shared<Shared>(); }

  __device__ __forceinline__ Terms read(int channel) const {
    T numbers[Shared::kNumbers];
#pragma unroll
    for (int n = 0; n < Shared::kNumbers; ++n) {
      numbers[n] = shared().numbers[n][channel][column_];
    }
    Terms terms;
    memcpy(&terms, numbers, sizeof terms);
    return terms;
  }

  std::uint32_t column_;
  Terms own_;
};

// --- Statistics ----------------------------------------------------------------------------------

struct BatchNormStatsLaunch {
  BatchNormGrid grid;
  BatchNormInput input;
  double count;  ///< elements of a channel
  double* packed;
  double* partials;
  std::uint32_t* arrivals;  ///< of each tile
};

// Reads every element once. Each block leaves one partial for each of its channels.
template <class S, class Layout>
__global__ void __launch_bounds__(kGridThreads, kSumBlocks<Layout>)
    batch_norm_stats_kernel(const BatchNormStatsLaunch __grid_constant__ launch) {
  WindowCursor<S, Layout> cursor(launch.grid);
  const ChannelOperand<S> input(launch.input, cursor.base_channel());
  MomentsOf<S, Layout> moments(launch.grid);
  constexpr int kLoads = sizeof(S) == (std::is_same_v<Layout, Rows> ? 2 : 8) ? 3 : 4;
  for_each_round<kLoads>(
      cursor, [&](const Window& window) { return load_window(input, window); },
      [&](const auto& windows, const auto& loaded) { moments.add(windows, loaded); });

  const auto [channel, total] = total_of_slices(launch.grid, cursor, moments.block_sum(launch.grid),
                                                launch.partials, launch.arrivals);
  if (channel >= 0) {
    pack_moments(moments_of(total), launch.packed, channel, launch.grid.channels);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) launch.packed[4 * launch.grid.channels] = launch.count;
}

// --- Output --------------------------------------------------------------------------------------

struct BatchNormElemtLaunch {
  BatchNormGrid grid;
  BatchNormInput input;
  BatchNormInput residual;
  BatchNormInput output;
  ChannelInput weight;
  ChannelInput bias;
  bool relu;
  BatchNormFinishArgs finish;
  std::uint32_t* arrivals;  ///< one
};

/// What the calling thread's channel is normalized with.
struct ChannelStatistics {
  double mean;
  double invstd;
};

/// Reads the statistics of a channel; `finishes`: and writes what is to be kept of them.
__device__ __forceinline__ ChannelStatistics finish_channel(const BatchNormFinishArgs& args,
                                                            std::int64_t c, bool finishes) {
  const ChannelOutput& mean = args.running_mean;
  const ChannelOutput& var = args.running_var;
  ChannelStatistics result;
  if (args.packed == nullptr) {
    result.mean = load_channel(mean.data, mean.dtype, c, 0.0);
    result.invstd = inverse_std(load_channel(var.data, var.dtype, c, 1.0), args.eps);
  } else {
    const Moments moments = unpack_moments(args.packed, c, args.channels);
    result.mean = moments.mean;
    result.invstd = inverse_std(biased_variance(moments), args.eps);
    // A batch without elements is no observation.
    if (finishes && moments.count > 0.0) {
      double factor = args.momentum;
      if (args.cumulative && args.num_batches_tracked != nullptr) {
        factor = 1.0 / static_cast<double>(*args.num_batches_tracked + 1);
      }
      const double old_mean = load_channel(mean.data, mean.dtype, c, 0.0);
      const double old_var = load_channel(var.data, var.dtype, c, 0.0);
      store_channel(mean, c, running_average(old_mean, moments.mean, factor));
      store_channel(var, c, running_average(old_var, unbiased_variance(moments), factor));
    }
  }
  if (finishes) {
    args.saved[c] = result.mean;
    args.saved[args.channels + c] = result.invstd;
  }
  return result;
}

/// The batch is counted by the last tile to have read the old number.
__device__ __forceinline__ void finish_count(const BatchNormElemtLaunch& launch, bool first_tile) {
  const BatchNormFinishArgs& args = launch.finish;
  const double count = args.packed == nullptr ? 0.0 : args.packed[4 * args.channels];
  if (first_tile && threadIdx.x == 0) args.saved[2 * args.channels] = count;
  if (count == 0.0 || args.num_batches_tracked == nullptr) return;
  const bool last = last_to_arrive(launch.arrivals, static_cast<std::uint32_t>(launch.grid.tiles));
  if (last && threadIdx.x == 0) *args.num_batches_tracked += 1;
}

// Reads every element once, of the residual too, and writes one. The blocks of slice 0 also keep
// the statistics of their channels.
template <class S, class Layout>
__global__ void __launch_bounds__(kGridThreads, kElementBlocks)
    batch_norm_elemt_kernel(const BatchNormElemtLaunch __grid_constant__ launch) {
  using T = ComputeTypeOf<S>;
  WindowCursor<S, Layout> cursor(launch.grid);
  const ChannelTerms<T, NormalizeTerms<T>, WindowCursor<S, Layout>> terms(
      launch.grid, cursor, [&](std::int64_t c) {
        const auto [mean, invstd] = finish_channel(launch.finish, c, cursor.slice == 0);
        return normalize_terms<T>(mean, invstd, load_channel(launch.weight, c, 1.0),
                                  load_channel(launch.bias, c, 0.0));
      });
  if (cursor.slice == 0) finish_count(launch, cursor.tile == 0);

  const ChannelOperand<S> input(launch.input, cursor.base_channel());
  const ChannelOperand<S> residual(launch.residual, cursor.base_channel());
  const ChannelOperand<S> output(launch.output, cursor.base_channel());
  const bool has_residual = launch.residual.data != nullptr;
  const bool relu = launch.relu;
  struct Loaded {
    RawWindow<S> input;
    RawWindow<S> residual;
  };
  constexpr int kLoads = std::is_same_v<Layout, Rows> && sizeof(S) != 2 ? 3 : 2;
  for_each_window<kLoads>(
      cursor,
      [&](const Window& window) {
        Loaded loaded{load_window(input, window), {}};
        if (has_residual) loaded.residual = load_window(residual, window);
        return loaded;
      },
      [&](const Window& window, Loaded& loaded) {
        terms.begin_window();
#pragma unroll
        for (int pair = 0; pair < kWindow<S> / 2; ++pair) {
          T x[2];
          T z[2];
          get_pair(loaded.input, pair, x);
          get_pair(loaded.residual, pair, z);
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const NormalizeTerms<T> term = terms.of((2 * pair + j) % cursor.kChannels);
            x[j] = normalize(x[j] - term.center, term.scale, term.shift);
            if (has_residual) x[j] = x[j] + z[j];
            if (relu) x[j] = kernels::max(x[j], T(0));
          }
          set_pair(loaded.input, pair, x);
        }
        store_window(output, window, loaded.input);
      });
}

}  // namespace torchfuse::kernels::cuda
