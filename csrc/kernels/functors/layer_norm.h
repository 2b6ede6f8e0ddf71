// SPDX-License-Identifier: BSD-3-Clause
// Layer normalization (Ba, Kiros and Hinton 2016) and RMS normalization (Zhang and Sennrich 2019),
// one row at a time. With g = dy * weight, and means over the row's columns:
//
//     x_hat = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps)      (RMS: mean(x) is taken as 0)
//     y     = x_hat * weight + bias
//     dx    = (g - mean(g) - x_hat * mean(g * x_hat)) / sqrt(...)    (RMS: without mean(g))
//
// The gradients of weight and bias are sums of dy * x_hat and dy over the rows.
#pragma once

#include "kernels/common/macros.h"
#include "kernels/common/math.h"

namespace torchfuse::kernels {

/// Returns a row's rstd from the mean of squared deviations.
template <class T>
TORCHFUSE_HOST_DEVICE T row_rstd(T mean_square, T eps) {
  return T(1) / kernels::sqrt(mean_square + eps);
}

template <class V>
TORCHFUSE_HOST_DEVICE V x_hat_of_input(V x, V mean, V rstd) {
  return (x - mean) * rstd;
}

/// Weights nearer to 0 are treated as this far from 0 when x_hat is recomputed from the output.
/// With such a weight, the output contains almost no information about the input.
constexpr double kLeastWeight = 1e-5;

template <class T>
TORCHFUSE_HOST_DEVICE T inverse_weight(T weight) {
  const T least = static_cast<T>(kLeastWeight);
  if (weight >= least || weight <= -least || weight != weight) return T(1) / weight;
  return T(1) / (weight < T(0) ? -least : least);
}

template <class V>
TORCHFUSE_HOST_DEVICE V x_hat_of_output(V y, V bias, V inverse_weight) {
  return (y - bias) * inverse_weight;
}

template <class V>
TORCHFUSE_HOST_DEVICE V layer_norm_output(V x_hat, V weight, V bias) {
  return fma(x_hat, weight, bias);
}

/// `mean_g` is 0 for RMS normalization.
template <class V>
TORCHFUSE_HOST_DEVICE V layer_norm_grad_input(V g, V x_hat, V mean_g, V minus_mean_g_x_hat,
                                              V rstd) {
  return fma(x_hat, minus_mean_g_x_hat, g - mean_g) * rstd;
}

}  // namespace torchfuse::kernels
