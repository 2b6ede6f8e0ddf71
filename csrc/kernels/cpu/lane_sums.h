// SPDX-License-Identifier: BSD-3-Clause
// Sums of squares in 64 lanes. Element i of a chunk is added in lane i % 64 at every vector width,
// and the lanes are added in a fixed tree. The result is therefore bit-identical at every
// instruction level.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/common/tensor_table.h"
#include "kernels/cpu/simd.h"
#include "kernels/functors/l2_norm.h"

namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE {

constexpr std::int64_t kLanes = 64;

/// Calls visit(chunk, first, stop) for each chunk of row `t` whose first flattened element is in
/// [begin, end). The chunk consists of the row's elements [first, stop).
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

/// One chunk's sums, by lane.
template <class T>
struct Sums {
  alignas(64) T small[kLanes] = {};
  alignas(64) T big[kLanes] = {};
  bool nonfinite = false;
};

/// Adds 64 elements if one reaches the threshold or is not finite. This case is rare. The function
/// is out of line so that the common loop keeps the sums in registers.
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

/// Number of vectors for the 64 lanes.
template <class T>
constexpr std::int64_t kLaneVectors = kLanes / Simd<T>::kWidth;

/// Adds the squares of 64 elements to the lanes. While vectors are added, `small` replaces
/// sums.small. `largest` contains the elements' largest magnitudes.
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
