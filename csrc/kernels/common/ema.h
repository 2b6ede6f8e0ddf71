// SPDX-License-Identifier: BSD-3-Clause
// The exponential moving average of a parameter, which a step moves as it writes the parameter.
//
// Note [Averages of weights]
//
//   ema = decay ema + (1 - decay) param
//
// where `param` is the new value as it was computed: the master's, or that of a 16-bit parameter
// before it is rounded. `start_step` delays the average: until the parameter's step count has
// passed it the average is a copy of the parameter. n counts the steps after that. Under `warmup`
// the decay of step n is at most (1 + n) / (10 + n), so that what the average began with is soon
// forgotten. The count is read on the device, as for bias corrections, and a skipped step leaves
// the average as it was.
//
// The average is one more operand of an update, not a state of a functor: every optimizer has it,
// and none without it pays for it. On CUDA it takes kernels of its own (cuda/ema_access.cuh).
#pragma once

#include "kernels/common/macros.h"
#include "kernels/common/math.h"

namespace torchfuse::kernels {

struct EmaParams {
  double decay = 0.0;       ///< in [0, 1)
  double start_step = 0.0;  ///< a whole number, at least 0
  bool warmup = false;
};

/// What the elements of a tensor share.
template <class T>
struct EmaCoefs {
  T weight;     ///< 1 - decay
  bool copies;  ///< the average becomes the parameter
};

/// `step` includes the current one.
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
