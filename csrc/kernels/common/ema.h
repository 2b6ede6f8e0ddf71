// SPDX-License-Identifier: BSD-3-Clause
// A parameter's exponential moving average, which a step updates together with the parameter.
//
// Note [Averages of weights]
//
//   ema = decay ema + (1 - decay) param
//
// where `param` is the new value as computed: the master's value, or a 16-bit parameter's value
// before rounding. `start_step` delays the average: until the parameter's step count exceeds
// `start_step`, the average is a copy of the parameter. n counts the steps after that. With
// `warmup`, the decay in step n is at most (1 + n) / (10 + n), so that the initial average is soon
// forgotten. The count is read on the device, as for bias corrections. A skipped step leaves the
// average unchanged.
//
// The average is an additional operand of the update, not a functor's state. Every optimizer
// supports averages, and updates without averages pay nothing. On CUDA, averages use separate
// kernels (cuda/ema_access.cuh).
#pragma once

#include "kernels/common/macros.h"
#include "kernels/common/math.h"

namespace torchfuse::kernels {

struct EmaParams {
  double decay = 0.0;       ///< in [0, 1)
  double start_step = 0.0;  ///< an integer, at least 0
  bool warmup = false;
};

/// Coefficients that a tensor's elements share.
template <class T>
struct EmaCoefs {
  T weight;     ///< 1 - decay
  bool copies;  ///< copy the parameter to the average
};

/// `step` includes the current step.
template <class T>
TORCHFUSE_HOST_DEVICE EmaCoefs<T> ema_coefs(const EmaParams& params, double step) {
  const double n = step - params.start_step;
  const double most = (1.0 + n) / (10.0 + n);
  const double decay = params.warmup && most < params.decay ? most : params.decay;
  EmaCoefs<T> coefs;
  coefs.weight = round_to<T>(1.0 - decay);
  coefs.copies = n <= 0.0 || decay == 0.0;
  return coefs;
}

/// One element, or one vector of elements.
template <class V, class T>
TORCHFUSE_HOST_DEVICE V moved_ema(V ema, V param, const EmaCoefs<T>& coefs) {
  return coefs.copies ? param : fma(V(coefs.weight), param - ema, ema);
}

}  // namespace torchfuse::kernels
