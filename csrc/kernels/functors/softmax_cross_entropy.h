// SPDX-License-Identifier: BSD-3-Clause
// Cross entropy of a softmax with label smoothing (Szegedy et al. 2016), one row of logits x at a
// time. With label y, s = smoothing and C classes:
//
//     log_sum = log(sum(exp(x - max(x))))
//     lse     = max(x) + log_sum
//     loss    = log_sum - (1 - s) * (x[y] - max(x)) - s * mean(x - max(x))
//     dx      = (exp(x - lse) - s / C - (1 - s) * [class is y]) * dloss
//
// Logits enter as differences alone: rounding is relative to their spread, not to their size. Of
// large logits lse keeps few digits of log_sum, so that it is stored in two parts: rounded, and the
// rest.
#pragma once

#include "kernels/common/exp.h"
#include "kernels/common/macros.h"
#include "kernels/common/math.h"

namespace torchfuse::kernels {

TORCHFUSE_HOST_DEVICE double log_of_sum(double sum) {
#if defined(__CUDA_ARCH__)
  return ::log(sum);
#else
  return __builtin_log(sum);
#endif
}

/// What `lse`, largest + log_sum rounded, lacks.
TORCHFUSE_HOST_DEVICE double rest_of(double lse, double largest, double log_sum) {
  return (largest - lse) + log_sum;
}

/// `label_below` and `mean_below`: the label's logit and the mean logit less the largest.
TORCHFUSE_HOST_DEVICE double smoothed_loss(double log_sum, double label_below, double mean_below,
                                           double smoothing) {
  const double loss = log_sum - (1.0 - smoothing) * label_below;
  // An infinite logit has no part in the mean where nothing is smoothed.
  return smoothing == 0.0 ? loss : loss - smoothing * mean_below;
}

/// The gradient of a logit that is not the label's; `floor` is s / C.
template <class T, class V>
TORCHFUSE_HOST_DEVICE V grad_logit(V x, V lse, V rest, V floor, V grad_loss) {
  return (exp_of_negative<T>((x - lse) - rest) - floor) * grad_loss;
}

}  // namespace torchfuse::kernels
