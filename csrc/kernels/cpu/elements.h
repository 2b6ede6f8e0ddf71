// SPDX-License-Identifier: BSD-3-Clause
// Vectors and single elements with one storage type, and sums that do not depend on the vector
// width.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/cpu/simd.h"

namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE {

// The scalar versions, for elements that do not fill a vector.
using kernels::max;
using kernels::pass_where_positive;

/// Number of partial sums: element i is added in lane i % 32, at every vector width.
constexpr std::int64_t kSumLanes = 32;
template <class T>
constexpr std::int64_t kSumVectors = kSumLanes / Simd<T>::kWidth;

/// Elements of the storage type kDType, computed in ComputeOf.
template <DType kDType>
struct StorageOf;
template <>
struct StorageOf<DType::kFloat32> {
  using Element = float;
  using Compute = float;
};
template <>
struct StorageOf<DType::kFloat64> {
  using Element = double;
  using Compute = double;
};
template <>
struct StorageOf<DType::kFloat16> {
  using Element = Half;
  using Compute = float;
};
template <>
struct StorageOf<DType::kBFloat16> {
  using Element = BFloat16;
  using Compute = float;
};
template <DType kDType>
using ElementOf = typename StorageOf<kDType>::Element;
template <DType kDType>
using ComputeOf = typename StorageOf<kDType>::Compute;
template <DType kDType>
using VectorOf = typename Simd<ComputeOf<kDType>>::V;
template <DType kDType>
constexpr std::int64_t kWidthOf = Simd<ComputeOf<kDType>>::kWidth;

TORCHFUSE_INLINE float load_one(const float* p) { return *p; }
TORCHFUSE_INLINE double load_one(const double* p) { return *p; }
TORCHFUSE_INLINE float load_one(const Half* p) { return to_float(*p); }
TORCHFUSE_INLINE float load_one(const BFloat16* p) { return to_float(*p); }
TORCHFUSE_INLINE void store_one(float* p, float x) { *p = x; }
TORCHFUSE_INLINE void store_one(double* p, double x) { *p = x; }
TORCHFUSE_INLINE void store_one(Half* p, float x) { *p = to_half(x); }
TORCHFUSE_INLINE void store_one(BFloat16* p, float x) { *p = to_bfloat16(x); }

/// Whether the level can load and store pairs of vectors, which pairs_are_faster() recommends.
template <DType kDType>
constexpr bool kHasPairs =
    kDType == DType::kBFloat16 &&
    requires(ElementOf<kDType>* p, VectorOf<kDType> x) { store_bf16_pair(p, x, x); };

template <DType kDType>
TORCHFUSE_INLINE VectorOf<kDType> load_vector(const ElementOf<kDType>* p) {
  return load(p, 0, kDType, ComputeOf<kDType>());
}
template <DType kDType>
TORCHFUSE_INLINE void store_vector(ElementOf<kDType>* p, VectorOf<kDType> x) {
  store(p, 0, kDType, x, ComputeOf<kDType>());
}

/// Load and store terms and accumulators, which have the compute type.
TORCHFUSE_INLINE Simd<float>::V load_terms(const float* p) { return load_f32(p); }
TORCHFUSE_INLINE Simd<double>::V load_terms(const double* p) { return load_f64(p); }
TORCHFUSE_INLINE void store_terms(float* p, Simd<float>::V x) { store_f32(p, x); }
TORCHFUSE_INLINE void store_terms(double* p, Simd<double>::V x) { store_f64(p, x); }

/// Loads the first `count` elements of a vector, fewer than a full vector. The other lanes contain
/// `fill`.
template <DType kDType>
TORCHFUSE_INLINE VectorOf<kDType> load_first(const ElementOf<kDType>* p, std::int64_t count,
                                             VectorOf<kDType> fill) {
#if defined(__AVX512F__)
  const auto lanes = static_cast<__mmask16>((1u << count) - 1);
  if constexpr (kDType == DType::kFloat32) return VecF(_mm512_mask_loadu_ps(fill.v, lanes, p));
  if constexpr (kDType == DType::kFloat64) {
    return VecD(_mm512_mask_loadu_pd(fill.v, static_cast<__mmask8>(lanes), p));
  }
  if constexpr (sizeof(ElementOf<kDType>) == 2) {
    alignas(32) ElementOf<kDType> loaded[kWidthOf<kDType>];
    _mm256_store_si256(reinterpret_cast<__m256i*>(loaded), _mm256_maskz_loadu_epi16(lanes, p));
    return VecF(_mm512_mask_mov_ps(fill.v, lanes, load_vector<kDType>(loaded).v));
  }
#else
  alignas(64) ComputeOf<kDType> lanes[kWidthOf<kDType>];
  memcpy(lanes, &fill, sizeof lanes);
  for (std::int64_t i = 0; i < count; ++i) lanes[i] = load_one(p + i);
  return load_terms(lanes);
#endif
}

/// Writes the first `count` elements of a vector.
template <DType kDType>
TORCHFUSE_INLINE void store_first(ElementOf<kDType>* p, std::int64_t count, VectorOf<kDType> x) {
  ElementOf<kDType> stored[kWidthOf<kDType>];
  store_vector<kDType>(stored, x);
  memcpy(p, stored, static_cast<std::size_t>(count) * sizeof(ElementOf<kDType>));
}

/// Calls full(v, offset) for the full vectors in `count` elements, fewer than kSumLanes, and
/// part(v, offset, elements) for the rest. `v` is the vector's index among the lanes.
template <class T, class Full, class Part>
TORCHFUSE_INLINE void for_each_lane_vector(std::int64_t count, const Full& full, const Part& part) {
  constexpr std::int64_t kWidth = Simd<T>::kWidth;
#pragma GCC unroll 32
  for (std::int64_t v = 0; v < kSumVectors<T>; ++v) {
    const std::int64_t left = count - v * kWidth;
    if (left >= kWidth) {
      full(v, v * kWidth);
    } else if (left > 0) {
      part(v, v * kWidth, left);
    }
  }
}

/// Sums the lanes in fp64, by halves, because 32 sequential additions take longer than a short row.
template <class T, class V>
TORCHFUSE_INLINE double sum_lanes(const V (&vectors)[kSumVectors<T>]) {
  alignas(64) T lanes[kSumLanes];
  memcpy(lanes, vectors, sizeof lanes);
  alignas(64) double sums[kSumLanes];
#pragma GCC unroll 32
  for (std::int64_t i = 0; i < kSumLanes; ++i) sums[i] = static_cast<double>(lanes[i]);
#pragma GCC unroll 8
  for (std::int64_t width = kSumLanes / 2; width > 0; width /= 2) {
#pragma GCC unroll 16
    for (std::int64_t i = 0; i < width; ++i) sums[i] += sums[i + width];
  }
  return sums[0];
}

template <std::int64_t kRows>
struct Rows {
  static constexpr std::int64_t value = kRows;
};

/// Calls body(Rows<n>(), row) for rows [begin, end), n at a time.
template <std::int64_t kBlock, class Body>
TORCHFUSE_INLINE void for_each_row_block(std::int64_t begin, std::int64_t end, const Body& body) {
  std::int64_t row = begin;
  if constexpr (kBlock > 1) {
    for (; row + kBlock <= end; row += kBlock) body(Rows<kBlock>(), row);
  }
  for (; row < end; ++row) body(Rows<1>(), row);
}

/// Calls vector(i) for full vectors and single(i) for elements that do not fill a vector. Results
/// and inputs are separate memory, so the last vector may overlap the previous one.
template <std::int64_t kWidth, class Vector, class Single>
TORCHFUSE_INLINE void for_each_element(std::int64_t count, const Vector& vector,
                                       const Single& single) {
  std::int64_t i = 0;
#pragma GCC unroll 4
  for (; i + kWidth <= count; i += kWidth) vector(i);
  if (i == count) return;
  if (count >= kWidth) {
    vector(count - kWidth);
  } else {
    for (; i < count; ++i) single(i);
  }
}

/// Calls body(std::integral_constant<DType, dtype>) with denormals flushed, except for fp64.
template <class Body>
TORCHFUSE_INLINE void with_dtype(DType dtype, const Body& body) {
  if (dtype == DType::kFloat64) return body.template operator()<DType::kFloat64>();
  const FlushDenormals flush;
  if (dtype == DType::kFloat32) return body.template operator()<DType::kFloat32>();
  if (dtype == DType::kFloat16) return body.template operator()<DType::kFloat16>();
  return body.template operator()<DType::kBFloat16>();
}

}  // namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE
