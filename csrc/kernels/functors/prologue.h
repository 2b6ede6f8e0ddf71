// SPDX-License-Identifier: BSD-3-Clause
// The step's decisions, made once on the device: skip or not, true norm, clip coefficient.
#pragma once

#include <cstdint>
#include <limits>

#include "kernels/common/float16.h"
#include "kernels/common/hyper_param.h"
#include "kernels/common/macros.h"
#include "kernels/common/math.h"
#include "kernels/functors/l2_norm.h"

namespace torchfuse::kernels {

struct PrologueParams {
  const float* grad_scale = nullptr;  ///< loss scale of the gradients; null means 1
  /// A non-zero value on entry skips the step. Set to 1 if `check` finds a non-finite gradient
  /// element, otherwise unchanged. Null without a scaler.
  float* found_inf = nullptr;
  bool found_inf_is_output = false;  ///< ignore the former value: set to 1 or 0
  bool check = false;                ///< skip the step if an element is not finite
  bool has_norm = false;             ///< sums exist; required by `check`, clipping and the norm
  double max_grad_norm = -1.0;       ///< clip to this norm; negative: no clipping
  /// Skip the step if the norm is greater. Requires `has_norm`. Does not count as an overflow.
  ScalarParam skip_norm_above{std::numeric_limits<double>::infinity()};
};

/// Clips like torch.nn.utils.clip_grad_norm_: the coefficient is min(1, max_norm / (norm + 1e-6)),
/// and a NaN norm is passed on.
TORCHFUSE_HOST_DEVICE StepScalars step_scalars(const PrologueParams& params,
                                               const NormPartial& sums) {
  // Round the reciprocal to float, as torch.amp does, so that both unscale identically.
  const double inverse_scale =
      params.grad_scale == nullptr ? 1.0 : nearest_float(1.0 / widened(*params.grad_scale));
  const bool found = params.check && sums.nonfinite != 0;
  bool skip = found;
  if (params.found_inf != nullptr) {
    if (!params.found_inf_is_output) skip = skip || *params.found_inf != 0.0f;
    if (found || params.found_inf_is_output) *params.found_inf = found ? 1.0f : 0.0f;
  }
  StepScalars scalars;
  scalars.grad_coef = inverse_scale;
  scalars.total_norm = bits_to_float(0x7fc00000u);
  if (params.has_norm) {
    const double norm = norm_of(sums) * inverse_scale;
    scalars.total_norm = round_to<float>(norm);
    skip = skip || norm > params.skip_norm_above.load();
    if (params.max_grad_norm >= 0.0) {
      const double clip = params.max_grad_norm / (norm + 1e-6);
      scalars.grad_coef = scalars.grad_coef * (clip < 1.0 || clip != clip ? clip : 1.0);
    }
  }
  scalars.skip = skip ? 1.0f : 0.0f;
  return scalars;
}

}  // namespace torchfuse::kernels
