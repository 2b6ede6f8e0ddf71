// SPDX-License-Identifier: BSD-3-Clause
// Several elements of one thread, as one value of a functor.
#pragma once

#include <cuda_runtime.h>

#include "kernels/common/math.h"
#include "kernels/cuda/straight_line.h"

namespace torchfuse::kernels::cuda {

/// `kCount` elements of type T with the operations that functors use: see kernels/cpu/simd.h.
template <class T, int kCount>
struct Lanes {
  T lane[kCount];

  Lanes() = default;
  __device__ __forceinline__ explicit Lanes(T all) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) lane[i] = all;
  }
  /// Returns values[first] and those that follow.
  template <int kValues>
  __device__ __forceinline__ static Lanes of(const T (&values)[kValues], int first) {
    Lanes lanes;
#pragma unroll
    for (int i = 0; i < kCount; ++i) lanes.lane[i] = values[first + i];
    return lanes;
  }
  template <int kValues>
  __device__ __forceinline__ void put(T (&values)[kValues], int first) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[first + i] = lane[i];
  }
};

/// Calls of(i) for each lane.
template <class T, int kCount, class Of>
__device__ __forceinline__ Lanes<T, kCount> each_lane(const Of& of) {
  Lanes<T, kCount> result;
#pragma unroll
  for (int i = 0; i < kCount; ++i) result.lane[i] = of(i);
  return result;
}

template <class T, int kCount>
__device__ __forceinline__ Lanes<T, kCount> operator+(const Lanes<T, kCount>& a,
                                                      const Lanes<T, kCount>& b) {
  return each_lane<T, kCount>([&](int i) { return a.lane[i] + b.lane[i]; });
}
template <class T, int kCount>
__device__ __forceinline__ Lanes<T, kCount> operator-(const Lanes<T, kCount>& a,
                                                      const Lanes<T, kCount>& b) {
  return each_lane<T, kCount>([&](int i) { return a.lane[i] - b.lane[i]; });
}
template <class T, int kCount>
__device__ __forceinline__ Lanes<T, kCount> operator*(const Lanes<T, kCount>& a,
                                                      const Lanes<T, kCount>& b) {
  return each_lane<T, kCount>([&](int i) { return a.lane[i] * b.lane[i]; });
}
template <class T, int kCount>
__device__ __forceinline__ Lanes<T, kCount> fma(const Lanes<T, kCount>& a,
                                                const Lanes<T, kCount>& b,
                                                const Lanes<T, kCount>& c) {
  return each_lane<T, kCount>([&](int i) { return kernels::fma(a.lane[i], b.lane[i], c.lane[i]); });
}
template <class T, int kCount>
__device__ __forceinline__ Lanes<T, kCount> max(const Lanes<T, kCount>& a,
                                                const Lanes<T, kCount>& b) {
  return each_lane<T, kCount>([&](int i) { return kernels::max(a.lane[i], b.lane[i]); });
}
template <class T, int kCount>
__device__ __forceinline__ Lanes<T, kCount> sign(const Lanes<T, kCount>& a) {
  return each_lane<T, kCount>([&](int i) { return kernels::sign(a.lane[i]); });
}

/// See Note [Straight-line quotients] in straight_line.h.
template <class T, int kCount>
__device__ __forceinline__ Lanes<T, kCount> operator/(const Lanes<T, kCount>& a,
                                                      const Lanes<T, kCount>& b) {
  if constexpr (sizeof(T) == sizeof(float)) {
    bool usual = true;
    const auto quotients = each_lane<T, kCount>([&](int i) {
      const float reciprocal = approximate_reciprocal(b.lane[i]);
      const float quotient = quotient_from(reciprocal, a.lane[i], b.lane[i]);
      usual &= is_usual_quotient(a.lane[i], b.lane[i], quotient);
      return quotient;
    });
    if (usual) return quotients;
  }
  return each_lane<T, kCount>([&](int i) { return a.lane[i] / b.lane[i]; });
}
template <class T, int kCount>
__device__ __forceinline__ Lanes<T, kCount> sqrt(const Lanes<T, kCount>& a) {
  if constexpr (sizeof(T) == sizeof(float)) {
    bool usual = true;
    const auto roots = each_lane<T, kCount>([&](int i) {
      usual &= has_usual_sqrt(a.lane[i]);
      return sqrt_from(approximate_inverse_sqrt(fmaxf(a.lane[i], kLeastRoot)), a.lane[i]);
    });
    if (usual) return roots;
  }
  return each_lane<T, kCount>([&](int i) { return kernels::sqrt(a.lane[i]); });
}

}  // namespace torchfuse::kernels::cuda
