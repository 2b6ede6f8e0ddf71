// SPDX-License-Identifier: BSD-3-Clause
// Adagrad (Duchi, Hazan and Singer 2011), like torch.optim.Adagrad, with optional decoupled weight
// decay.
#pragma once

#include "kernels/common/hyper_param.h"
#include "kernels/common/macros.h"
#include "kernels/common/math.h"

namespace torchfuse::kernels {

struct AdagradParams {
  ScalarParam lr;
  ScalarParam lr_decay;
  ScalarParam eps;
  ScalarParam weight_decay;
  bool adagrad_w_mode = false;  ///< decoupled weight decay; false adds it to the gradient
  bool maximize = false;
};

struct Adagrad {
  using Params = AdagradParams;
  static constexpr const char* kName = "adagrad";
  static constexpr HyperParamEntry<Params> kHyperParams[] = {
      {"lr", &Params::lr},
      {"lr_decay", &Params::lr_decay},
      {"eps", &Params::eps},
      {"weight_decay", &Params::weight_decay},
      {"adagrad_w_mode", &Params::adagrad_w_mode},
      {"maximize", &Params::maximize},
  };
  static constexpr const char* kStateNames[] = {"sum"};
  static constexpr int kNumStates = 1;
  static constexpr bool kDivides = true;

  /// Returns whether these hyper-parameters use the operand `state`.
  TORCHFUSE_HOST_DEVICE static bool uses_state(const Params&, int /*state*/) { return true; }

  /// Coefficients that a tensor's elements share.
  template <class T>
  struct Coefs {
    T grad_sign;
    T l2_decay;         ///< weight_decay in L2 mode, else 0
    T decoupled_decay;  ///< weight_decay in decoupled mode, else 0
    T eps;
    T minus_lr;  ///< -lr / (1 + (step - 1) lr_decay)
  };

  template <class T>
  TORCHFUSE_HOST_DEVICE static Coefs<T> prepare(const Params& params, double step) {
    const double weight_decay = params.weight_decay.load();
    Coefs<T> coefs;
    coefs.grad_sign = params.maximize ? T(-1) : T(1);
    coefs.l2_decay = params.adagrad_w_mode ? T(0) : round_to<T>(weight_decay);
    coefs.decoupled_decay = params.adagrad_w_mode ? round_to<T>(weight_decay) : T(0);
    coefs.eps = round_to<T>(params.eps.load());
    coefs.minus_lr = round_to<T>(-params.lr.load() / (1.0 + (step - 1.0) * params.lr_decay.load()));
    return coefs;
  }

  ///   g = +-grad + l2_decay * p
  ///   s += g^2
  ///   p -= lr / (1 + (step - 1) lr_decay) (g / (sqrt(s) + eps) + decoupled_decay * p)
  template <class V, class T>
  TORCHFUSE_HOST_DEVICE static void update(V& param, V grad, V (&state)[kNumStates],
                                           const Coefs<T>& coefs) {
    const V g = fma(V(coefs.l2_decay), param, grad * V(coefs.grad_sign));
    state[0] = fma(g, g, state[0]);
    const V scaled = g / (sqrt(state[0]) + V(coefs.eps));
    param = fma(V(coefs.minus_lr), fma(V(coefs.decoupled_decay), param, scaled), param);
  }
};

}  // namespace torchfuse::kernels
