// SPDX-License-Identifier: BSD-3-Clause
// Sums of squares in 64 lanes, element i of a chunk in lane i % 64, whatever the vector width; the
// lanes are added in a fixed tree. So the result is the same bits at every instruction level.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/common/tensor_table.h"
#include "kernels/cpu/simd.h"
#include "kernels/functors/l2_norm.h"

namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE {

constexpr std::int64_t kLanes = 64;

/// Calls visit(chunk, first, stop) for each chunk of row `t`, elements [first, stop) of it, whose
/// first flattened element lies in [begin, end).
template <class Visit>
TORCHFUSE_INLINE void for_each_norm_chunk(const TensorTable& table, std::int64_t t,
                                          std::int64_t begin, std::int64_t end,
                                          const Visit& visit) {
  const std::int64_t numel = table.rows[t].numel;
  const std::int64_t skipped = begin > table.offsets[t] ? begin - table.offsets[t] : 0;
  for (std::int64_t chunk = (skipped + kNormChunk - 1) / kNormChunk;
       chunk * kNormChunk < numel && table.offsets[t] + chunk * kNormChunk < end; ++chunk) {
    const std::int64_t first = chunk * kNormChunk;
    visit(chunk, first, first + kNormChunk < numel ? first + kNormChunk : numel);
  }
}

template <class T>
TORCHFUSE_INLINE T magnitude(T x) {
  return x < T(0) ? -x : x;
}

#if defined(__AVX512F__)
TORCHFUSE_INLINE bool reaches(VecF x, float threshold) {
  const __m512i bits = _mm512_and_si512(_mm512_castps_si512(x.v), _mm512_set1_epi32(0x7fffffff));
  const __m512i limit = _mm512_set1_epi32(static_cast<int>(float_bits(threshold)));
  return _mm512_cmpge_epu32_mask(bits, limit) != 0;
}
TORCHFUSE_INLINE VecF larger_magnitude(VecF a, VecF b) {
  const __m512i mask = _mm512_set1_epi32(0x7fffffff);
  return VecF(
      _mm512_castsi512_ps(_mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(a.v), mask),
                                           _mm512_and_si512(_mm512_castps_si512(b.v), mask))));
}
TORCHFUSE_INLINE bool reaches(VecD x, double threshold) {
  return _mm512_cmp_pd_mask(_mm512_abs_pd(x.v), _mm512_set1_pd(threshold), _CMP_NLT_UQ) != 0;
}
TORCHFUSE_INLINE VecD larger_magnitude(VecD a, VecD b) {
  const __m512i mask = _mm512_set1_epi64(0x7fffffffffffffff);
  return VecD(
      _mm512_castsi512_pd(_mm512_max_epu64(_mm512_and_si512(_mm512_castpd_si512(a.v), mask),
                                           _mm512_and_si512(_mm512_castpd_si512(b.v), mask))));
}
#elif defined(__AVX2__)
TORCHFUSE_INLINE bool reaches(VecF x, float threshold) {
  const __m256i bits = _mm256_and_si256(_mm256_castps_si256(x.v), _mm256_set1_epi32(0x7fffffff));
  const __m256i limit = _mm256_set1_epi32(static_cast<int>(float_bits(threshold)));
  return _mm256_movemask_epi8(_mm256_cmpgt_epi32(limit, bits)) != -1;
}
TORCHFUSE_INLINE VecF larger_magnitude(VecF a, VecF b) {
  const __m256i mask = _mm256_set1_epi32(0x7fffffff);
  return VecF(
      _mm256_castsi256_ps(_mm256_max_epu32(_mm256_and_si256(_mm256_castps_si256(a.v), mask),
                                           _mm256_and_si256(_mm256_castps_si256(b.v), mask))));
}
TORCHFUSE_INLINE bool reaches(VecD x, double threshold) {
  const __m256d absolute = _mm256_andnot_pd(_mm256_set1_pd(-0.0), x.v);
  return _mm256_movemask_pd(_mm256_cmp_pd(absolute, _mm256_set1_pd(threshold), _CMP_NLT_UQ)) != 0;
}
TORCHFUSE_INLINE VecD larger_magnitude(VecD a, VecD b) {
  // As signed integers the bits of non-negative doubles are ordered, NaN above infinity.
  const __m256i mask = _mm256_set1_epi64x(0x7fffffffffffffff);
  const __m256i x = _mm256_and_si256(_mm256_castpd_si256(a.v), mask);
  const __m256i y = _mm256_and_si256(_mm256_castpd_si256(b.v), mask);
  return VecD(_mm256_castsi256_pd(_mm256_blendv_epi8(y, x, _mm256_cmpgt_epi64(x, y))));
}
#else
template <class T>
TORCHFUSE_INLINE bool reaches(T x, T threshold) {
  return !(magnitude(x) < threshold);
}
template <class T>
TORCHFUSE_INLINE T larger_magnitude(T a, T b) {
  return kernels::max(magnitude(a), magnitude(b));
}
#endif

/// Sums of one chunk, by lane.
template <class T>
struct Sums {
  alignas(64) T small[kLanes] = {};
  alignas(64) T big[kLanes] = {};
  bool nonfinite = false;
};

/// Sixty-four elements of which one is at or above the threshold, or not finite. Rare, and out of
/// line so that the common loop keeps its sums in registers.
template <class T>
__attribute__((noinline)) void add_large(Sums<T>& sums, const T* x) {
  for (std::int64_t lane = 0; lane < kLanes; ++lane) {
    if (magnitude(x[lane]) < NormLimits<T>::kThreshold) {
      sums.small[lane] = kernels::fma(x[lane], x[lane], sums.small[lane]);
      continue;
    }
    if (!(magnitude(x[lane]) <= NormLimits<T>::kMax)) sums.nonfinite = true;
    const T scaled = x[lane] * NormLimits<T>::kScale;
    sums.big[lane] = kernels::fma(scaled, scaled, sums.big[lane]);
  }
}

/// Vectors that hold the 64 lanes.
template <class T>
constexpr std::int64_t kLaneVectors = kLanes / Simd<T>::kWidth;

/// Adds the squares of 64 elements to the lanes. `small` stands for sums.small as long as vectors
/// are added; `largest` are the elements' largest magnitudes.
template <class T, class V>
TORCHFUSE_INLINE void add_lanes(Sums<T>& sums, V (&small)[kLaneVectors<T>],
                                const V (&x)[kLaneVectors<T>], V largest) {
  if (__builtin_expect(reaches(largest, NormLimits<T>::kThreshold), 0)) {
    alignas(64) T lanes[kLanes];
    memcpy(lanes, x, sizeof lanes);
    memcpy(sums.small, small, sizeof sums.small);
    add_large<T>(sums, lanes);
    memcpy(small, sums.small, sizeof sums.small);
    return;
  }
#pragma GCC unroll 16
  for (std::int64_t v = 0; v < kLaneVectors<T>; ++v) small[v] = fma(x[v], x[v], small[v]);
}

template <class T>
TORCHFUSE_INLINE NormPartial finish(const Sums<T>& sums) {
  double small[kLanes / 4];
  double big[kLanes / 4];
  for (std::int64_t i = 0; i < kLanes / 4; ++i) {
    small[i] = static_cast<double>((sums.small[i] + sums.small[i + 16]) +
                                   (sums.small[i + 32] + sums.small[i + 48]));
    big[i] = static_cast<double>((sums.big[i] + sums.big[i + 16]) +
                                 (sums.big[i + 32] + sums.big[i + 48]));
  }
  for (std::int64_t width = kLanes / 8; width > 0; width /= 2) {
    for (std::int64_t i = 0; i < width; ++i) {
      small[i] += small[i + width];
      big[i] += big[i + width];
    }
  }
  return make_partial(T(), small[0], big[0], sums.nonfinite);
}

}  // namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE
