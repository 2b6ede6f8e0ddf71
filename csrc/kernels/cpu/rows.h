// SPDX-License-Identifier: BSD-3-Clause
// Walks along a row of elements.
#pragma once

#include <cstdint>

#include "kernels/cpu/elements.h"

namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE {

/// Calls body(lane vector, offset, elements) for vectors that together have each of `count`
/// elements, element i in lane i % kSumLanes. `elements` is the width but for the last vector.
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

/// A vector of `elements` elements and zeros.
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

template <class V, std::int64_t kCount>
TORCHFUSE_INLINE void clear(V (&vectors)[kCount]) {
  using T = typename ScalarOf<V>::Type;
#pragma GCC unroll 32
  for (std::int64_t v = 0; v < kCount; ++v) vectors[v] = V(T(0));
}

}  // namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE
