// SPDX-License-Identifier: BSD-3-Clause
// Channels first: sums over one thread's elements. A bounded number of elements is added in the
// compute type, and the results in fp64.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/batch_norm_combine.cuh"

namespace torchfuse::kernels::cuda {

/// Maximum number of additions to an fp32 sum before the sum moves to fp64.
constexpr int kMaxAdditions = 64;

/// Two sums for a channel. Even and odd elements have separate sums, so that additions do not
/// wait for each other.
template <class S>
class PlaneSums {
 public:
  using T = ComputeTypeOf<S>;
  static constexpr int kChains = 2;
  static constexpr int kWindows = kMaxAdditions * kChains / kWindow<S>;

  /// Adds `term` to the first sum, for element `e` of a window, and a * b to the second.
  __device__ __forceinline__ void add(int e, T term, T a, T b) {
    sum_[e % kChains] += term;
    product_[e % kChains] = kernels::fma(a, b, product_[e % kChains]);
  }

  /// Must be called after each window.
  __device__ __forceinline__ void end_window() {
    if (++windows_ == kWindows) flush();
  }

  /// Moves the compute-type sums to `first` and `second`.
  __device__ __forceinline__ void flush() {
#pragma unroll
    for (int i = 0; i < kChains; ++i) {
      first += static_cast<double>(sum_[i]);
      second += static_cast<double>(product_[i]);
      sum_[i] = product_[i] = T(0);
    }
    windows_ = 0;
  }

  double first = 0.0;
  double second = 0.0;

 private:
  T sum_[kChains] = {};
  T product_[kChains] = {};
  int windows_ = 0;
};

/// Gradient sums of a tile's channels.
template <class S>
class PlaneGradSums : public PlaneSums<S> {
 public:
  __device__ __forceinline__ explicit PlaneGradSums(const BatchNormGrid&) {}
  __device__ __forceinline__ void end_round(int /*windows*/) {}
  /// Flushes the sums and returns tile_sum().
  __device__ __forceinline__ DeviationSums block_sum(const BatchNormGrid& grid) {
    this->flush();
    return tile_sum(DeviationSums{this->first, this->second}, grid.lanes, grid.columns);
  }
};

/// Moments of a thread's elements about the first element.
template <class S>
class PlaneMoments {
 public:
  using T = ComputeTypeOf<S>;

  __device__ __forceinline__ explicit PlaneMoments(const BatchNormGrid&) {}

  template <int kLoads>
  __device__ __forceinline__ void add(const Window (&windows)[kLoads],
                                      const RawWindow<S> (&raw)[kLoads]) {
#pragma unroll
    for (int k = 0; k < kLoads; ++k) add(windows[k], raw[k]);
  }

  /// Flushes the sums and returns tile_sum().
  __device__ __forceinline__ PivotedSums block_sum(const BatchNormGrid& grid) {
    sums_.flush();
    return tile_sum(PivotedSums{static_cast<double>(pivot_), sums_.first, sums_.second,
                                static_cast<double>(count_)},
                    grid.lanes, grid.columns);
  }

 private:
  __device__ __forceinline__ void add(const Window& window, const RawWindow<S>& raw) {
    if (window.hi == 0) return;
    if (count_ == 0) take_pivot(window, raw);
    count_ += window.hi - window.lo;
    if (is_full<S>(window)) {
      add_elements<true>(window, raw);
    } else {
      add_elements<false>(window, raw);
    }
    sums_.end_window();
  }

  __device__ __forceinline__ void take_pivot(const Window& window, const RawWindow<S>& raw) {
#pragma unroll
    for (int e = kWindow<S> - 1; e >= 0; --e) {
      if (e >= window.lo && e < window.hi) pivot_ = widen(get_element<S>(raw, e));
    }
  }

  template <bool kFull>
  __device__ __forceinline__ void add_elements(const Window& window, const RawWindow<S>& raw) {
#pragma unroll
    for (int pair = 0; pair < kWindow<S> / 2; ++pair) {
      T values[2];
      get_pair(raw, pair, values);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int e = 2 * pair + j;
        const T deviation = values[j] - pivot_;
        if (kFull || (e >= window.lo && e < window.hi)) {
          sums_.add(e, deviation, deviation, deviation);
        }
      }
    }
  }

  PlaneSums<S> sums_;
  T pivot_ = T(0);
  std::int64_t count_ = 0;
};

}  // namespace torchfuse::kernels::cuda
