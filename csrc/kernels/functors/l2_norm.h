// SPDX-License-Identifier: BSD-3-Clause
// One gradient element's contribution to the statistics: sum of squares and non-finite flag.
//
// Note [Two accumulators]
// A float accumulator overflows at sums near 2^128, so squares of large elements would turn a
// finite gradient into an infinite norm. Elements below `kThreshold` are squared directly. Larger
// elements are first multiplied by `kScale`, and their sum is scaled back in fp64, where squares of
// all floats fit. For fp64 gradients, both sums stay separate until the final square root. A second
// pass is not needed, and scaling does not affect small elements.
#pragma once

#include <cstdint>

#include "kernels/common/macros.h"
#include "kernels/common/math.h"
#include "kernels/common/step_scalars.h"

namespace torchfuse::kernels {

/// Elements per NormPartial. The number is fixed, so that sums do not depend on threads or grid
/// size. Small models have smaller chunks on CUDA devices: see norm_chunk_on_cuda().
constexpr std::int64_t kNormChunk = 16384;

template <class T>
struct NormLimits;

template <>
struct NormLimits<float> {
  // A lane of a chunk adds 256 squares in fp32; their sum stays below 2^124.
  static constexpr float kThreshold = 0x1p58f;
  static constexpr float kScale = 0x1p-80f;
  static constexpr float kMax = 0x1.fffffep127f;
};

template <>
struct NormLimits<double> {
  static constexpr double kThreshold = 0x1p500;
  static constexpr double kScale = 0x1p-600;
  static constexpr double kMax = 0x1.fffffffffffffp1023;
};

/// Returns a chunk's sums as a partial. Float sums are combined in `small`, because squares of
/// floats fit a double.
TORCHFUSE_HOST_DEVICE NormPartial make_partial(float, double small, double big, bool nonfinite) {
  return NormPartial{small + big * 0x1p160, 0.0, nonfinite ? 1u : 0u};
}

TORCHFUSE_HOST_DEVICE NormPartial make_partial(double, double small, double big, bool nonfinite) {
  return NormPartial{small, big, nonfinite ? 1u : 0u};
}

TORCHFUSE_HOST_DEVICE NormPartial operator+(const NormPartial& a, const NormPartial& b) {
  return NormPartial{a.small + b.small, a.big + b.big, a.nonfinite | b.nonfinite};
}

/// Returns the L2 norm for the sums.
TORCHFUSE_HOST_DEVICE double norm_of(const NormPartial& sums) {
  if (sums.big == 0.0) return kernels::sqrt(sums.small);
  return kernels::sqrt(sums.big + sums.small * 0x1p-1000 * 0x1p-200) * 0x1p600;
}

}  // namespace torchfuse::kernels
