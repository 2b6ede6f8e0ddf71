// SPDX-License-Identifier: BSD-3-Clause
// Iterates over a row's elements.
#pragma once

#include <cstdint>

#include "kernels/cpu/elements.h"

namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE {

/// Calls body(lane vector, offset, elements) for vectors that together contain all `count`
/// elements, element i in lane i % kSumLanes. `elements` is the vector width, except for the last
/// vector.
template <class T, class Body>
TORCHFUSE_INLINE void for_each_summed_vector(std::int64_t count, const Body& body) {
  constexpr std::int64_t kWidth = Simd<T>::kWidth;
  std::int64_t i = 0;
  for (; i + kSumLanes <= count; i += kSumLanes) {
#pragma GCC unroll 32
    for (std::int64_t v = 0; v < kSumVectors<T>; ++v) body(v, i + v * kWidth, kWidth);
  }
  for_each_lane_vector<T>(
      count - i,
      [&](std::int64_t v, std::int64_t offset)
          __attribute__((always_inline)) { body(v, i + offset, kWidth); },
      [&](std::int64_t v, std::int64_t offset, std::int64_t left)
          __attribute__((always_inline)) { body(v, i + offset, left); });
}

/// Returns a vector of `elements` elements; the other lanes contain `fill`.
template <DType kDType>
TORCHFUSE_INLINE VectorOf<kDType> load_some(const ElementOf<kDType>* p, std::int64_t elements,
                                            VectorOf<kDType> fill) {
  return elements == kWidthOf<kDType> ? load_vector<kDType>(p)
                                      : load_first<kDType>(p, elements, fill);
}
template <DType kDType>
TORCHFUSE_INLINE void store_some(ElementOf<kDType>* p, std::int64_t elements, VectorOf<kDType> x) {
  if (elements == kWidthOf<kDType>) return store_vector<kDType>(p, x);
  store_first<kDType>(p, elements, x);
}

/// Rows longer than kSummedTogether are summed in sections of kPiece elements. In the compute type,
/// each lane would lose digits as the row gets longer.
constexpr std::int64_t kSummedTogether = 8192;
constexpr std::int64_t kPiece = 1024;

/// Computes sums over a row with `count` elements: in the compute type, or section by section in
/// fp64, in order. Calls body(sums, lane vector, offset, elements) like for_each_summed_vector();
/// `body` adds to sums[which][lane vector].
template <class T, std::int64_t kSums, class Body>
TORCHFUSE_INLINE void sum_row(std::int64_t count, double (&totals)[kSums], const Body& body) {
  using V = typename Simd<T>::V;
  for (double& total : totals) total = 0.0;
  const std::int64_t piece = count <= kSummedTogether ? kSummedTogether : kPiece;
  for (std::int64_t first = 0; first < count; first += piece) {
    const std::int64_t left = count - first;
    V sums[kSums][kSumVectors<T>];
#pragma GCC unroll 2
    for (auto& vectors : sums) {
#pragma GCC unroll 32
      for (V& vector : vectors) vector = V(T(0));
    }
    for_each_summed_vector<T>(
        left < piece ? left : piece,
        [&](std::int64_t v, std::int64_t i, std::int64_t elements)
            __attribute__((always_inline)) { body(sums, v, first + i, elements); });
#pragma GCC unroll 2
    for (std::int64_t which = 0; which < kSums; ++which) {
      totals[which] += sum_lanes<T>(sums[which]);
    }
  }
}

}  // namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE
