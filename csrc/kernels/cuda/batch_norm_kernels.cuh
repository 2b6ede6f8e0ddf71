// SPDX-License-Identifier: BSD-3-Clause
// Kernels for batch normalization's forward pass: statistics, then the output.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/batch_norm.h"
#include "kernels/cuda/batch_norm_row_sums.cuh"

namespace torchfuse::kernels::cuda {

/// Terms of a tile's channels. For each number (of type T), adjacent columns are contiguous. A tile
/// is at most a warp wide.
template <class T, class Terms, int kChannels>
struct TermsShared {
  static constexpr int kNumbers = static_cast<int>(sizeof(Terms) / sizeof(T));
  T numbers[kNumbers][kChannels][kWarp];
};

/// Terms of the calling thread's channels. A single channel's terms stay in registers. A row's
/// terms would need up to 48 registers, so every window reads them again.
template <class T, class Terms, class Cursor>
class ChannelTerms {
 public:
  static constexpr int kChannels = Cursor::kChannels;
  using Shared = TermsShared<T, Terms, kChannels>;

  /// Stores terms_of(channel) for the tile's channels. All threads in the block must take part.
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

  /// Must be called before each window, so that the compiler does not keep the terms in registers.
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
  double count;  ///< elements per channel
  double* packed;
  double* partials;
  std::uint32_t* arrivals;  ///< one counter per tile
};

// Reads every element once. If there are several slices, each block writes a partial per channel.
template <class S, class Layout, bool kWhole>
__global__ void __launch_bounds__(kGridThreads, kSumBlocks<Layout>)
    batch_norm_stats_kernel(const BatchNormStatsLaunch __grid_constant__ launch) {
  WindowCursor<S, Layout, kWhole> cursor(launch.grid);
  const ChannelOperand<S, kWhole> input(launch.input, cursor.base_channel());
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
  std::uint32_t* arrivals;  ///< one counter
};

/// Statistics that normalize the calling thread's channel.
struct ChannelStatistics {
  double mean;
  double invstd;
};

/// Returns a channel's statistics. `finishes` also saves mean and invstd and updates averages.
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
    // An empty batch does not update the running averages.
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

/// Saves the element count. The last tile to read the old num_batches_tracked increments it.
__device__ __forceinline__ void finish_count(const BatchNormElemtLaunch& launch, bool first_tile) {
  const BatchNormFinishArgs& args = launch.finish;
  const double count = args.packed == nullptr ? 0.0 : args.packed[4 * args.channels];
  if (first_tile && threadIdx.x == 0) args.saved[2 * args.channels] = count;
  if (count == 0.0 || args.num_batches_tracked == nullptr) return;
  const bool last = last_to_arrive(launch.arrivals, static_cast<std::uint32_t>(launch.grid.tiles));
  if (last && threadIdx.x == 0) *args.num_batches_tracked += 1;
}

// Reads every element of input and residual once and writes every output element once. Blocks of
// slice 0 also save their channels' statistics.
template <class S, class Layout, bool kWhole>
__global__ void __launch_bounds__(kGridThreads, kElementBlocks)
    batch_norm_elemt_kernel(const BatchNormElemtLaunch __grid_constant__ launch) {
  using T = ComputeTypeOf<S>;
  WindowCursor<S, Layout, kWhole> cursor(launch.grid);
  const ChannelTerms<T, NormalizeTerms<T>, WindowCursor<S, Layout, kWhole>> terms(
      launch.grid, cursor, [&](std::int64_t c) {
        const auto [mean, invstd] = finish_channel(launch.finish, c, cursor.slice == 0);
        return normalize_terms<T>(mean, invstd, load_channel(launch.weight, c, 1.0),
                                  load_channel(launch.bias, c, 0.0));
      });
  if (cursor.slice == 0) finish_count(launch, cursor.tile == 0);

  const ChannelOperand<S, kWhole> input(launch.input, cursor.base_channel());
  const ChannelOperand<S, kWhole> residual(launch.residual, cursor.base_channel());
  const ChannelOperand<S, kWhole> output(launch.output, cursor.base_channel());
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
