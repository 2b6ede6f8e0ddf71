// SPDX-License-Identifier: BSD-3-Clause
// Channels last: sums over a warp's elements.
//
// Note [Sums of rows]
// A window has up to eight channels. Two fp64 sums per channel would occupy half the registers.
// Most launches would use these sums only once, at the end, because fp32 is enough for 64 windows.
// So after 64 windows, a warp's lanes that read the same channels combine their sums in fp64. The
// first such lane adds the result to the warp's sums in shared memory. All lanes execute the same
// rounds, some with empty windows. A warp uses one pivot per channel for all rows.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/batch_norm_sums.cuh"

namespace torchfuse::kernels::cuda {

/// Two sums per channel: the fields kFirst and kFirst + 1 of Partial.
template <class S, class Partial, int kFirst>
class RowSums {
 public:
  using T = ComputeTypeOf<S>;
  static constexpr int kChannels = kWindow<S>;

  __device__ __forceinline__ explicit RowSums(const BatchNormGrid& grid) : columns_(grid.columns) {
    auto& fields = block_shared<TileShared<Partial>>().fields;
    fields[kFirst][threadIdx.x / kWarp][threadIdx.x % kWarp] = 0.0;
    fields[kFirst + 1][threadIdx.x / kWarp][threadIdx.x % kWarp] = 0.0;
    __syncwarp();
  }

  /// Adds `term` to the first sum for the window's channel `c`, and a * b to the second.
  __device__ __forceinline__ void add(int c, T term, T a, T b) {
    sum_[c] += term;
    product_[c] = kernels::fma(a, b, product_[c]);
  }

  __device__ __forceinline__ void end_window() {}

  /// All lanes of the warp must call it after each round.
  __device__ __forceinline__ void end_round(int windows) {
    windows_ += windows;
    if (windows_ + windows > kMaxAdditions) flush();
  }

  /// Moves the thread's sums to the warp's sums. All lanes of the warp must call it.
  __device__ __forceinline__ void flush() {
    auto& fields = block_shared<TileShared<Partial>>().fields;
    const std::uint32_t lane = threadIdx.x % kWarp;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      double first = static_cast<double>(sum_[c]);
      double second = static_cast<double>(product_[c]);
#pragma unroll 1
      for (std::uint32_t d = kWarp / 2; d >= columns_; d /= 2) {
        first += __shfl_down_sync(0xffffffffu, first, d);
        second += __shfl_down_sync(0xffffffffu, second, d);
      }
      if (lane < columns_) {
        const std::uint32_t place = lane * kChannels + static_cast<std::uint32_t>(c);
        fields[kFirst][threadIdx.x / kWarp][place] += first;
        fields[kFirst + 1][threadIdx.x / kWarp][place] += second;
      }
      sum_[c] = product_[c] = T(0);
      // For the compiler alone, which would otherwise keep all channels' fp64 sums in registers.
      __syncwarp();
    }
    windows_ = 0;
  }

 private:
  std::uint32_t columns_;
  // Aligned so that the compiler can combine accesses to adjacent elements.
  alignas(16) T sum_[kChannels] = {};
  alignas(16) T product_[kChannels] = {};
  int windows_ = 0;
};

/// Gradient sums of a tile's channels.
template <class S>
class RowGradSums : public RowSums<S, DeviationSums, 0> {
 public:
  using RowSums<S, DeviationSums, 0>::RowSums;
  /// Flushes the sums and returns sum_of_warps().
  __device__ __forceinline__ DeviationSums block_sum(const BatchNormGrid& grid) {
    this->flush();
    return sum_of_warps<DeviationSums>(grid.columns * this->kChannels);
  }
};

/// Moments of a warp's elements about each channel's first element.
template <class S>
class RowMoments {
 public:
  using T = ComputeTypeOf<S>;
  static constexpr int kChannels = kWindow<S>;

  __device__ __forceinline__ explicit RowMoments(const BatchNormGrid& grid)
      : sums_(grid), columns_(grid.columns) {}

  template <int kLoads>
  __device__ __forceinline__ void add(const Window (&windows)[kLoads],
                                      const RawWindow<S> (&raw)[kLoads]) {
    if (!has_pivots_) take_pivots(raw[0]);
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      if (windows[k].hi == 0) continue;
      ++count_;
#pragma unroll
      for (int pair = 0; pair < kChannels / 2; ++pair) {
        T values[2];
        get_pair(raw[k], pair, values);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int c = 2 * pair + j;
          const T deviation = values[j] - pivot_[c];
          sums_.add(c, deviation, deviation, deviation);
        }
      }
    }
    sums_.end_round(kLoads);
  }

  /// Flushes the sums and returns sum_of_warps().
  __device__ __forceinline__ PivotedSums block_sum(const BatchNormGrid& grid) {
    sums_.flush();
    std::uint32_t count = count_;
#pragma unroll 1
    for (std::uint32_t d = kWarp / 2; d >= columns_; d /= 2) {
      count += __shfl_down_sync(0xffffffffu, count, d);
    }
    auto& fields = block_shared<TileShared<PivotedSums>>().fields;
    const std::uint32_t lane = threadIdx.x % kWarp;
    if (lane < columns_) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        const std::uint32_t place = lane * kChannels + static_cast<std::uint32_t>(c);
        fields[0][threadIdx.x / kWarp][place] = static_cast<double>(pivot_[c]);
        fields[3][threadIdx.x / kWarp][place] = static_cast<double>(count);
      }
    }
    return sum_of_warps<PivotedSums>(grid.columns * kChannels);
  }

 private:
  /// Broadcasts pivots from each column's first lane, whose window comes first.
  __device__ __forceinline__ void take_pivots(const RawWindow<S>& raw) {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      pivot_[c] = __shfl_sync(0xffffffffu, widen(get_element<S>(raw, c)),
                              static_cast<int>(threadIdx.x % columns_));
    }
    has_pivots_ = true;
  }

  RowSums<S, PivotedSums, 1> sums_;
  std::uint32_t columns_;
  alignas(16) T pivot_[kChannels] = {};
  std::uint32_t count_ = 0;
  bool has_pivots_ = false;
};

template <class S, class Layout>
using MomentsOf = std::conditional_t<std::is_same_v<Layout, Rows>, RowMoments<S>, PlaneMoments<S>>;
template <class S, class Layout>
using GradSumsOf =
    std::conditional_t<std::is_same_v<Layout, Rows>, RowGradSums<S>, PlaneGradSums<S>>;

}  // namespace torchfuse::kernels::cuda
