// SPDX-License-Identifier: BSD-3-Clause
// Adam and AdamW (Kingma and Ba 2015; Loshchilov and Hutter 2019), with AMSGrad (Reddi et al.
// 2018).
#pragma once

#include "kernels/common/hyper_param.h"
#include "kernels/common/macros.h"
#include "kernels/common/math.h"

namespace torchfuse::kernels {

struct AdamParams {
  ScalarParam lr;
  ScalarParam beta1;
  ScalarParam beta2;
  ScalarParam eps;
  ScalarParam weight_decay;
  bool bias_correction = true;
  bool adam_w_mode =
      true;  ///< decoupled weight decay; false adds weight_decay * param to the gradient
  bool amsgrad = false;
  bool maximize = false;
};

struct Adam {
  using Params = AdamParams;
  static constexpr const char* kName = "adam";
  static constexpr HyperParamEntry<Params> kHyperParams[] = {
      {"lr", &Params::lr},
      {"beta1", &Params::beta1, kDecayRate},
      {"beta2", &Params::beta2, kDecayRate},
      {"weight_decay", &Params::weight_decay},
      {"eps", &Params::eps},
      {"amsgrad", &Params::amsgrad},
      {"maximize", &Params::maximize},
      {"adam_w_mode", &Params::adam_w_mode},
      {"bias_correction", &Params::bias_correction},
  };
  static constexpr const char* kStateNames[] = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
  static constexpr int kNumStates = 3;    ///< exp_avg, exp_avg_sq, max_exp_avg_sq (AMSGrad only)
  static constexpr int kLeastStates = 2;  ///< always used
  static constexpr bool kDivides = true;

  /// Returns whether these hyper-parameters use the operand `state`.
  TORCHFUSE_HOST_DEVICE static bool uses_state(const Params& params, int state) {
    return state < 2 || params.amsgrad;
  }

  /// Coefficients that a tensor's elements share: hyper-parameters and bias corrections, rounded
  /// once to the accumulation type.
  template <class T>
  struct Coefs {
    T grad_sign;
    T l2_decay;        ///< weight_decay in L2 mode, else 0
    T minus_lr_decay;  ///< -lr * weight_decay in decoupled mode, else 0
    T one_minus_beta1;
    T one_minus_beta2;
    T inverse_sqrt_bias2;  ///< 1 / sqrt(1 - beta2^step)
    T eps;
    T minus_step_size;  ///< -lr / (1 - beta1^step)
    bool amsgrad;
  };

  /// Computes in fp64 and rounds at the end, so that host and device agree bit for bit.
  template <class T>
  TORCHFUSE_HOST_DEVICE static Coefs<T> prepare(const Params& params, double step) {
    const double lr = params.lr.load();
    const double beta1 = params.beta1.load();
    const double beta2 = params.beta2.load();
    const double weight_decay = params.weight_decay.load();
    const Powers powers =
        params.bias_correction ? integer_powers(beta1, beta2, step) : Powers{0.0, 0.0};
    const double bias1 = 1.0 - powers.a;
    const double bias2 = 1.0 - powers.b;
    Coefs<T> coefs;
    coefs.grad_sign = params.maximize ? T(-1) : T(1);
    coefs.l2_decay = params.adam_w_mode ? T(0) : round_to<T>(weight_decay);
    coefs.minus_lr_decay = params.adam_w_mode ? round_to<T>(-lr * weight_decay) : T(0);
    coefs.one_minus_beta1 = round_to<T>(1.0 - beta1);
    coefs.one_minus_beta2 = round_to<T>(1.0 - beta2);
    coefs.inverse_sqrt_bias2 = round_to<T>(1.0 / kernels::sqrt(bias2));
    coefs.eps = round_to<T>(params.eps.load());
    coefs.minus_step_size = round_to<T>(-lr / bias1);
    coefs.amsgrad = params.amsgrad;
    return coefs;
  }

  /// Updates one element or one vector: `V` is T or a SIMD vector of T.
  ///
  ///   g  = +-grad + l2_decay * p
  ///   m += (1 - beta1) (g - m)         v += (1 - beta2) (g^2 - v)
  ///   p -= lr weight_decay p + step_size m / (sqrt(v) / sqrt(bias2) + eps)
  template <class V, class T>
  TORCHFUSE_HOST_DEVICE static void update(V& param, V grad, V (&state)[kNumStates],
                                           const Coefs<T>& coefs) {
    const V g = fma(V(coefs.l2_decay), param, grad * V(coefs.grad_sign));
    // See Note [Decay rates of zero] in kernels/common/math.h.
    const V m = forgotten(coefs.one_minus_beta1) ? V(T(0)) : state[0];
    const V v = forgotten(coefs.one_minus_beta2) ? V(T(0)) : state[1];
    state[0] = fma(V(coefs.one_minus_beta1), g - m, m);
    state[1] = fma(V(coefs.one_minus_beta2), fma(g, g, V(T(0)) - v), v);
    V second_moment = state[1];
    if (coefs.amsgrad) {
      state[2] = max(state[2], state[1]);
      second_moment = state[2];
    }
    const V denominator = fma(sqrt(second_moment), V(coefs.inverse_sqrt_bias2), V(coefs.eps));
    // Sum both changes before adding them to the parameter, so that only one rounding is at the
    // parameter's magnitude.
    const V adam_change = state[0] / denominator * V(coefs.minus_step_size);
    param = param + fma(V(coefs.minus_lr_decay), param, adam_change);
  }
};

}  // namespace torchfuse::kernels
