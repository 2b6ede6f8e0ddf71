// SPDX-License-Identifier: BSD-3-Clause
// Softmax cross entropy with label smoothing (Szegedy et al. 2016), for one row of logits x. With
// label y, s = smoothing and C classes:
//
//     log_sum = log(sum(exp(x - max(x))))
//     lse     = max(x) + log_sum
//     loss    = log_sum - (1 - s) * (x[y] - max(x)) - s * mean(x - max(x))
//     dx      = (exp(x - lse) - s / C - (1 - s) * [class is y]) * dloss
//
// Only differences of logits are used, so rounding is relative to the logits' spread, not to the
// logits' size. If logits are large, lse keeps only a few digits of log_sum. Therefore lse is
// stored in two parts: the rounded value and the rest.
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

/// Returns the rounding error of `lse` = largest + log_sum.
TORCHFUSE_HOST_DEVICE double rest_of(double lse, double largest, double log_sum) {
  return (largest - lse) + log_sum;
}

/// `label_below` and `mean_below` are the label's logit and the mean logit, minus the largest
/// logit.
TORCHFUSE_HOST_DEVICE double smoothed_loss(double log_sum, double label_below, double mean_below,
                                           double smoothing) {
  const double loss = log_sum - (1.0 - smoothing) * label_below;
  // Without smoothing, an infinite logit must not enter through the mean.
  return smoothing == 0.0 ? loss : loss - smoothing * mean_below;
}

/// Returns the gradient of a logit that is not the label's. `floor` is s / C.
template <class T, class V>
TORCHFUSE_HOST_DEVICE V grad_logit(V x, V lse, V rest, V floor, V grad_loss) {
  return (exp_of_negative<T>((x - lse) - rest) - floor) * grad_loss;
}

}  // namespace torchfuse::kernels
