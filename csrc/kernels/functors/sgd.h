// SPDX-License-Identifier: BSD-3-Clause
// Stochastic gradient descent with momentum (Sutskever et al. 2013), like torch.optim.SGD.
#pragma once

#include "kernels/common/hyper_param.h"
#include "kernels/common/macros.h"
#include "kernels/common/math.h"

namespace torchfuse::kernels {

struct SgdParams {
  ScalarParam lr;
  ScalarParam momentum;
  ScalarParam dampening;
  ScalarParam weight_decay;
  bool nesterov = false;
  bool wd_after_momentum = false;  ///< add weight_decay * param after the momentum
  bool maximize = false;
};

struct Sgd {
  using Params = SgdParams;
  static constexpr const char* kName = "sgd";
  static constexpr HyperParamEntry<Params> kHyperParams[] = {
      {"lr", &Params::lr},
      {"momentum", &Params::momentum},
      {"dampening", &Params::dampening},
      {"weight_decay", &Params::weight_decay},
      {"nesterov", &Params::nesterov},
      {"wd_after_momentum", &Params::wd_after_momentum},
      {"maximize", &Params::maximize},
  };
  static constexpr const char* kStateNames[] = {"momentum_buffer"};
  static constexpr int kNumStates = 1;    ///< momentum_buffer (with momentum only)
  static constexpr int kLeastStates = 0;  ///< always used
  static constexpr bool kCountsFromStart = true;

  /// Returns whether these hyper-parameters use the operand `state`. A momentum on the device may
  /// become positive at any time.
  TORCHFUSE_HOST_DEVICE static bool uses_state(const Params& params, int /*state*/) {
    return params.momentum.pointer != nullptr || params.momentum.value != 0.0;
  }

  /// Coefficients that a tensor's elements share.
  template <class T>
  struct Coefs {
    T grad_sign;
    T decay_before;  ///< weight_decay, or 0 under wd_after_momentum
    T decay_after;   ///< weight_decay under wd_after_momentum, else 0
    T keep;          ///< factor of the old buffer: momentum, 0 in the first step
    T take;          ///< factor of the gradient: 1 - dampening, 1 in the first step
    T momentum;
    T minus_lr;
    bool has_momentum;
    bool nesterov;
  };

  /// `step` counts from the step in which the buffer begins.
  template <class T>
  TORCHFUSE_HOST_DEVICE static Coefs<T> prepare(const Params& params, double step) {
    const double momentum = params.momentum.load();
    const double weight_decay = params.weight_decay.load();
    const bool first = step == 1.0;
    Coefs<T> coefs;
    coefs.grad_sign = params.maximize ? T(-1) : T(1);
    coefs.decay_before = params.wd_after_momentum ? T(0) : round_to<T>(weight_decay);
    coefs.decay_after = params.wd_after_momentum ? round_to<T>(weight_decay) : T(0);
    coefs.keep = first ? T(0) : round_to<T>(momentum);
    coefs.take = first ? T(1) : round_to<T>(1.0 - params.dampening.load());
    coefs.momentum = round_to<T>(momentum);
    coefs.minus_lr = round_to<T>(-params.lr.load());
    coefs.has_momentum = momentum != 0.0;
    coefs.nesterov = params.nesterov;
    return coefs;
  }

  ///   g = +-grad + decay_before * p
  ///   b = momentum b + (1 - dampening) g          (b = g in the first step)
  ///   d = g + momentum b (nesterov), else b       (d = g without momentum; b stays)
  ///   p -= lr (d + decay_after * p)
  template <class V, class T>
  TORCHFUSE_HOST_DEVICE static void update(V& param, V grad, V (&state)[kNumStates],
                                           const Coefs<T>& coefs) {
    V change = fma(V(coefs.decay_before), param, grad * V(coefs.grad_sign));
    if (coefs.has_momentum) {
      state[0] = fma(V(coefs.keep), state[0], change * V(coefs.take));
      change = coefs.nesterov ? fma(V(coefs.momentum), state[0], change) : state[0];
    }
    change = fma(V(coefs.decay_after), param, change);
    param = fma(V(coefs.minus_lr), change, param);
  }
};

}  // namespace torchfuse::kernels
