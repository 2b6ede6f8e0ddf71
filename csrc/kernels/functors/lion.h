// SPDX-License-Identifier: BSD-3-Clause
// Lion (Chen et al. 2023, "Symbolic discovery of optimization algorithms").
#pragma once

#include "kernels/common/hyper_param.h"
#include "kernels/common/macros.h"
#include "kernels/common/math.h"

namespace torchfuse::kernels {

struct LionParams {
  ScalarParam lr;
  ScalarParam beta1;
  ScalarParam beta2;
  ScalarParam weight_decay;
  bool maximize = false;
};

struct Lion {
  using Params = LionParams;
  static constexpr const char* kName = "lion";
  static constexpr HyperParamEntry<Params> kHyperParams[] = {
      {"lr", &Params::lr},
      {"beta1", &Params::beta1, kDecayRate},
      {"beta2", &Params::beta2, kDecayRate},
      {"weight_decay", &Params::weight_decay},
      {"maximize", &Params::maximize},
  };
  static constexpr const char* kStateNames[] = {"exp_avg"};
  static constexpr int kNumStates = 1;

  TORCHFUSE_HOST_DEVICE static bool uses_state(const Params&, int) { return true; }

  template <class T>
  struct Coefs {
    T grad_sign;
    T beta1;
    T one_minus_beta1;
    T one_minus_beta2;
    T minus_lr;
    T minus_lr_decay;
  };

  template <class T>
  TORCHFUSE_HOST_DEVICE static Coefs<T> prepare(const Params& params, double /*step*/) {
    const double lr = params.lr.load();
    Coefs<T> coefs;
    coefs.grad_sign = params.maximize ? T(-1) : T(1);
    const double beta1 = params.beta1.load();
    const double beta2 = params.beta2.load();
    coefs.beta1 = round_to<T>(beta1);
    coefs.one_minus_beta1 = round_to<T>(1.0 - beta1);
    coefs.one_minus_beta2 = round_to<T>(1.0 - beta2);
    coefs.minus_lr = round_to<T>(-lr);
    coefs.minus_lr_decay = round_to<T>(-lr * params.weight_decay.load());
    return coefs;
  }

  ///   c  = beta1 m + (1 - beta1) (+-grad)
  ///   m += (1 - beta2) (+-grad - m)
  ///   p -= lr weight_decay p + lr sign(c)
  template <class V, class T>
  TORCHFUSE_HOST_DEVICE static void update(V& param, V grad, V (&state)[kNumStates],
                                           const Coefs<T>& coefs) {
    const V g = grad * V(coefs.grad_sign);
    const V direction = fma(V(coefs.beta1), state[0], g * V(coefs.one_minus_beta1));
    // See Note [Decay rates of zero] in kernels/common/math.h.
    const V m = forgotten(coefs.one_minus_beta2) ? V(T(0)) : state[0];
    state[0] = fma(V(coefs.one_minus_beta2), g - m, m);
    // Sum both changes before adding them to the parameter, so that only one rounding is at the
    // parameter's magnitude.
    param = param + fma(V(coefs.minus_lr_decay), param, sign(direction) * V(coefs.minus_lr));
  }
};

}  // namespace torchfuse::kernels
