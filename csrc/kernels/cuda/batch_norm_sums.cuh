// SPDX-License-Identifier: BSD-3-Clause
// Sums of the elements that one thread sees: in their compute type over a bounded number of
// them, in fp64 beyond.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/batch_norm_combine.cuh"

namespace torchfuse::kernels::cuda {

/// Additions to an fp32 sum before it moves to fp64.
constexpr int kMaxAdditions = 64;

/// Two sums of each channel of a window. Channels first, even and odd elements are added apart, so
/// that additions do not wait for each other.
template <class S, class Layout>
class WindowSums {
 public:
  using T = ComputeTypeOf<S>;
  static constexpr int kChannels = kWindowChannels<S, Layout>;
  static constexpr int kChains = kChannels == 1 ? 2 : kChannels;
  static constexpr int kWindows = kMaxAdditions * kChains / kWindow<S>;

  /// `term` to the first sum of element `e` of a window, and a * b to the second.
  __device__ __forceinline__ void add(int e, T term, T a, T b) {
    sum_[e % kChains] += term;
    product_[e % kChains] = kernels::fma(a, b, product_[e % kChains]);
  }

  /// After each window.
  __device__ __forceinline__ void end_window() {
    if (++windows_ == kWindows) flush();
  }

  /// Moves what has been added to `first` and `second`.
  __device__ __forceinline__ void flush() {
#pragma unroll
    for (int i = 0; i < kChains; ++i) {
      first[i % kChannels] += static_cast<double>(sum_[i]);
      second[i % kChannels] += static_cast<double>(product_[i]);
      sum_[i] = product_[i] = T(0);
    }
    windows_ = 0;
  }

  double first[kChannels] = {};
  double second[kChannels] = {};

 private:
  T sum_[kChains] = {};
  T product_[kChains] = {};
  int windows_ = 0;
};

/// The moments of a thread's elements, about the first one of each channel.
template <class S, class Layout>
class PivotedWindows {
 public:
  using T = ComputeTypeOf<S>;
  static constexpr int kChannels = kWindowChannels<S, Layout>;

  __device__ __forceinline__ void add(const Window& window, const RawWindow<S>& raw) {
    if (window.hi == 0) return;
    if (count_ == 0) take_pivots(window, raw);
    count_ += kChannels == 1 ? window.hi - window.lo : 1;
    if (is_full<S>(window)) {
      add_elements<true>(window, raw);
    } else {
      add_elements<false>(window, raw);
    }
    sums_.end_window();
  }

  __device__ __forceinline__ void partials(PivotedSums (&result)[kChannels]) {
    sums_.flush();
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      result[c] = PivotedSums{static_cast<double>(pivot_[c]), sums_.first[c], sums_.second[c],
                              static_cast<double>(count_)};
    }
  }

 private:
  __device__ __forceinline__ void take_pivots(const Window& window, const RawWindow<S>& raw) {
#pragma unroll
    for (int e = kWindow<S> - 1; e >= 0; --e) {
      if (e >= window.lo && e < window.hi) pivot_[e % kChannels] = widen(get_element<S>(raw, e));
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
        const T deviation = values[j] - pivot_[e % kChannels];
        if (kFull || (e >= window.lo && e < window.hi)) {
          sums_.add(e, deviation, deviation, deviation);
        }
      }
    }
  }

  WindowSums<S, Layout> sums_;
  T pivot_[kChannels] = {};
  std::int64_t count_ = 0;
};

}  // namespace torchfuse::kernels::cuda
