// SPDX-License-Identifier: BSD-3-Clause
// Sums of squares over a thread's elements.
#pragma once

#include <cuda_runtime.h>

#include <cmath>

#include "kernels/functors/l2_norm.h"

namespace torchfuse::kernels::cuda {

/// One thread's sums. Squares below the threshold are less than 2^120 (2^1000 in fp64), scaled
/// squares less than 2^96 (2^848), and a thread adds at most 64 of each. A non-finite sum therefore
/// proves a non-finite element. Conversely, NaN and infinity survive squaring and adding.
template <class T>
struct ThreadSums {
  static constexpr int kChains = 4;  ///< independent additions
  T small[kChains] = {};
  T big = T(0);

  __device__ __forceinline__ void add(T x, int chain) {
    if (fabs(x) < NormLimits<T>::kThreshold) {
      small[chain] = kernels::fma(x, x, small[chain]);
    } else {
      const T scaled = x * NormLimits<T>::kScale;
      big = kernels::fma(scaled, scaled, big);
    }
  }

  __device__ __forceinline__ NormPartial partial() const {
    const T sum = (small[0] + small[1]) + (small[2] + small[3]);
    const bool finite = sum <= NormLimits<T>::kMax && big <= NormLimits<T>::kMax;
    return make_partial(T(), static_cast<double>(sum), static_cast<double>(big), !finite);
  }
};

/// One thread's sums for one norm.
template <class T>
struct ThreadMeasure {
  ThreadSums<T> sums;
  T largest = T(0);

  __device__ __forceinline__ void add(T x, int chain) {
    sums.add(x, chain);
    largest = kernels::max(largest, static_cast<T>(fabs(x)));
  }

  __device__ __forceinline__ MeasurePartial partial() const {
    return MeasurePartial{sums.partial(), static_cast<double>(largest)};
  }
};

}  // namespace torchfuse::kernels::cuda
