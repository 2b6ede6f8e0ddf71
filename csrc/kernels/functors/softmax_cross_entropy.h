// SPDX-License-Identifier: BSD-3-Clause
// Cross entropy of a softmax with label smoothing (Szegedy et al. 2016), one row of logits x at a
// time. With label y, s = smoothing and C classes:
//
//     lse  = max(x) + log(sum(exp(x - max(x))))
//     loss = lse - (1 - s) * x[y] - s * mean(x)
//     dx   = (exp(x - lse) - s / C - (1 - s) * [class is y]) * dloss
#pragma once

#include "kernels/common/exp.h"
#include "kernels/common/macros.h"
#include "kernels/common/math.h"

namespace torchfuse::kernels {

TORCHFUSE_HOST_DEVICE double log_sum_exp(double largest, double sum) {
#if defined(__CUDA_ARCH__)
  return largest + ::log(sum);
#else
  return largest + __builtin_log(sum);
#endif
}

TORCHFUSE_HOST_DEVICE double smoothed_loss(double lse, double label_logit, double mean_logit,
                                           double smoothing) {
  const double loss = lse - (1.0 - smoothing) * label_logit;
  // An infinite logit has no part in the mean where nothing is smoothed.
  return smoothing == 0.0 ? loss : loss - smoothing * mean_logit;
}

/// The gradient of a logit that is not the label's; `floor` is s / C.
template <class T, class V>
TORCHFUSE_HOST_DEVICE V grad_logit(V x, V lse, V floor, V grad_loss) {
  return (exp_of_negative<T>(x - lse) - floor) * grad_loss;
}

}  // namespace torchfuse::kernels
