// SPDX-License-Identifier: BSD-3-Clause
// What the prologue computes once per step and every update kernel reads.
#pragma once

#include <cstdint>

namespace torchfuse::kernels {

/// Lives on the step's device. The host never reads it; `ops` hands out `total_norm` and `skip` as
/// tensors that are views of these fields.
struct StepScalars {
  double grad_coef;  ///< every gradient is multiplied by this: clip coefficient x inverse scale
  float total_norm;  ///< L2 norm of the unscaled gradients; NaN when it was not asked for
  float skip;        ///< 1 when the step leaves everything as it was, else 0
};

/// Sums of squares of one chunk of gradients. See Note [Two accumulators] in functors/l2_norm.h.
struct NormPartial {
  double small;             ///< sum of x^2 over the elements below the threshold
  double big;               ///< sum of (x * kBigScale)^2 over the others
  std::uint64_t nonfinite;  ///< non-zero if an element is infinite or NaN
};

}  // namespace torchfuse::kernels
