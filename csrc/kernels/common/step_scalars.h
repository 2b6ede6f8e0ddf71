// SPDX-License-Identifier: BSD-3-Clause
// Scalars that the prologue computes once per step and that every update kernel reads.
#pragma once

#include <cstdint>

#include "kernels/common/float16.h"
#include "kernels/common/macros.h"
#include "kernels/common/math.h"

namespace torchfuse::kernels {

/// Stored on the step's device. The host never reads the scalars. `ops` returns `total_norm` and
/// `skip` as tensors that view these fields.
struct StepScalars {
  double grad_coef;  ///< factor of every gradient: clip coefficient x inverse scale
  float total_norm;  ///< L2 norm of the unscaled gradients; NaN if not requested
  float skip;        ///< 1 if the step is skipped, else 0
};

/// A gradient's factor. A loss scale above 2^126, or a smaller scale with a clip coefficient, makes
/// the factor denormal in fp32. Kernels flush denormals, although the factor's product with a
/// scaled gradient is normal. Such a factor is stored 2^126 times larger, and products are scaled
/// back by a power of two, so the gradient is rounded once.
template <class T>
struct GradCoef {
  T factor;
  bool tiny;

  template <class V>
  TORCHFUSE_HOST_DEVICE V scaled(V grad) const {
    const V product = grad * V(factor);
    return tiny ? product * V(rescale()) : product;
  }

  /// Returns the factor that scales a product back.
  TORCHFUSE_HOST_DEVICE T rescale() const { return tiny ? T(0x1p-126) : T(1); }
};

template <class T>
TORCHFUSE_HOST_DEVICE GradCoef<T> grad_coef_of(double coef) {
  const bool tiny = sizeof(T) < sizeof(double) && coef < 0x1p-126 && coef > -0x1p-126;
  return {round_to<T>(tiny ? coef * 0x1p126 : coef), tiny};
}

/// Returns the exact value, even where denormals count as zeros.
TORCHFUSE_HOST_DEVICE double widened(float x) {
  const std::uint32_t bits = float_bits(x);
  if ((bits & 0x7f800000u) != 0) return static_cast<double>(x);
  const double magnitude = static_cast<double>(bits & 0x7fffffu) * 0x1p-149;
  return (bits >> 31) != 0 ? -magnitude : magnitude;
}

/// Returns the nearest fp32 number, which may be denormal.
TORCHFUSE_HOST_DEVICE double nearest_float(double x) {
  if (!(x < 0x1p-126 && x > -0x1p-126)) return static_cast<double>(static_cast<float>(x));
  constexpr double kSpacedLikeDenormals = 0x1.8p-97;
  return (x + kSpacedLikeDenormals) - kSpacedLikeDenormals;
}

/// One gradient chunk's sums of squares. See Note [Two accumulators] in functors/l2_norm.h.
struct NormPartial {
  double small;             ///< sum of x^2 over the elements below the threshold
  double big;               ///< sum of (x * kBigScale)^2 over the others
  std::uint64_t nonfinite;  ///< non-zero if an element is infinite or NaN
};

}  // namespace torchfuse::kernels
