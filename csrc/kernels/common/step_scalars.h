// SPDX-License-Identifier: BSD-3-Clause
// What the prologue computes once per step and every update kernel reads.
#pragma once

#include <cstdint>

#include "kernels/common/float16.h"
#include "kernels/common/macros.h"
#include "kernels/common/math.h"

namespace torchfuse::kernels {

/// Lives on the step's device. The host never reads it; `ops` hands out `total_norm` and `skip` as
/// tensors that are views of these fields.
struct StepScalars {
  double grad_coef;  ///< every gradient is multiplied by this: clip coefficient x inverse scale
  float total_norm;  ///< L2 norm of the unscaled gradients; NaN when it was not asked for
  float skip;        ///< 1 when the step leaves everything as it was, else 0
};

/// What a gradient is multiplied by, as two factors. A loss scale above 2^126, or a smaller one
/// with a clip coefficient, makes the product of both denormal in fp32, which kernels flush, while
/// a scaled gradient times it is normal. Both factors are normal, and the second is a power of two:
/// the gradient is rounded once.
template <class T>
struct GradCoef {
  T first;
  T second;

  template <class V>
  TORCHFUSE_HOST_DEVICE V scaled(V grad) const {
    return grad * V(first) * V(second);
  }
};

template <class T>
TORCHFUSE_HOST_DEVICE GradCoef<T> grad_coef_of(double coef) {
  constexpr double kSmallest = 0x1p-126;
  if (sizeof(T) == sizeof(double) || !(coef < kSmallest && coef > -kSmallest)) {
    return {round_to<T>(coef), T(1)};
  }
  return {round_to<T>(coef / kSmallest), T(kSmallest)};
}

/// The number itself, also where denormals count as zeros.
TORCHFUSE_HOST_DEVICE double widened(float x) {
  const std::uint32_t bits = float_bits(x);
  if ((bits & 0x7f800000u) != 0) return static_cast<double>(x);
  const double magnitude = static_cast<double>(bits & 0x7fffffu) * 0x1p-149;
  return (bits >> 31) != 0 ? -magnitude : magnitude;
}

/// The nearest number of fp32, which may be denormal.
TORCHFUSE_HOST_DEVICE double nearest_float(double x) {
  if (!(x < 0x1p-126 && x > -0x1p-126)) return static_cast<double>(static_cast<float>(x));
  constexpr double kSpacedLikeDenormals = 0x1.8p-97;
  return (x + kSpacedLikeDenormals) - kSpacedLikeDenormals;
}

/// Sums of squares of one chunk of gradients. See Note [Two accumulators] in functors/l2_norm.h.
struct NormPartial {
  double small;             ///< sum of x^2 over the elements below the threshold
  double big;               ///< sum of (x * kBigScale)^2 over the others
  std::uint64_t nonfinite;  ///< non-zero if an element is infinite or NaN
};

}  // namespace torchfuse::kernels
