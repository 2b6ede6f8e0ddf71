// SPDX-License-Identifier: BSD-3-Clause
// LAMB (You et al. 2020, "Large batch optimization for deep learning: training BERT in 76
// minutes"), in apex's variants.
#pragma once

#include "kernels/common/hyper_param.h"
#include "kernels/common/macros.h"
#include "kernels/common/math.h"

namespace torchfuse::kernels {

struct LambParams {
  ScalarParam lr;
  ScalarParam beta1;
  ScalarParam beta2;
  ScalarParam eps;
  ScalarParam weight_decay;
  ScalarParam min_trust_ratio;
  ScalarParam max_trust_ratio;
  bool bias_correction = true;
  bool grad_averaging = true;  ///< the gradient enters the first moment with 1 - beta1, else with 1
  bool adam_w_mode = true;     ///< decoupled weight decay; false adds the decay to the gradient
  bool use_nvlamb = false;     ///< use the trust ratio even without weight decay
  bool maximize = false;
};

struct Lamb {
  using Params = LambParams;
  static constexpr const char* kName = "lamb";
  static constexpr HyperParamEntry<Params> kHyperParams[] = {
      {"lr", &Params::lr},
      {"beta1", &Params::beta1, kDecayRate},
      {"beta2", &Params::beta2, kDecayRate},
      {"weight_decay", &Params::weight_decay},
      {"eps", &Params::eps},
      {"min_trust_ratio", &Params::min_trust_ratio},
      {"max_trust_ratio",
       &Params::max_trust_ratio,
       {.may_be_infinite = true, .at_least_previous = true}},
      {"bias_correction", &Params::bias_correction},
      {"adam_w_mode", &Params::adam_w_mode},
      {"grad_averaging", &Params::grad_averaging},
      {"use_nvlamb", &Params::use_nvlamb},
      {"maximize", &Params::maximize},
  };
  static constexpr const char* kStateNames[] = {"exp_avg", "exp_avg_sq"};
  static constexpr int kNumStates = 2;
  static constexpr bool kDivides = true;
  static constexpr int kNumNorms = 2;  ///< norms of the parameter and its update
  static constexpr bool kStatesInMeasure = true;
  static constexpr bool kTracksNorm = false;

  TORCHFUSE_HOST_DEVICE static bool uses_state(const Params&, int) { return true; }

  template <class T>
  struct Coefs {
    T grad_sign;
    T l2_decay;         ///< weight_decay in L2 mode, else 0
    T decay;            ///< weight_decay in decoupled mode, else 0
    T one_minus_beta1;  ///< with grad_weight: m += (1 - beta1) (grad_weight g - m)
    T grad_weight;
    T one_minus_beta2;
    T inverse_bias1;       ///< 1 / (1 - beta1^step)
    T inverse_sqrt_bias2;  ///< 1 / sqrt(1 - beta2^step)
    T eps;
    T minus_lr;  ///< times the trust ratio, once the norms are known
  };

  template <class T>
  TORCHFUSE_HOST_DEVICE static Coefs<T> prepare(const Params& params, double step) {
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
    coefs.decay = params.adam_w_mode ? round_to<T>(weight_decay) : T(0);
    coefs.one_minus_beta1 = round_to<T>(1.0 - beta1);
    coefs.grad_weight = params.grad_averaging ? T(1) : round_to<T>(1.0 / (1.0 - beta1));
    coefs.one_minus_beta2 = round_to<T>(1.0 - beta2);
    coefs.inverse_bias1 = round_to<T>(1.0 / bias1);
    coefs.inverse_sqrt_bias2 = round_to<T>(1.0 / kernels::sqrt(bias2));
    coefs.eps = round_to<T>(params.eps.load());
    coefs.minus_lr = round_to<T>(-params.lr.load());
    return coefs;
  }

  ///   trust = |p| / |u| within its bounds, 1 if either is 0 or there is no decay (but for NVLAMB)
  template <class T>
  TORCHFUSE_HOST_DEVICE static void apply_norms(const Params& params, const double* norms,
                                                Coefs<T>& coefs) {
    double trust = 1.0;
    const bool adapts = params.use_nvlamb || params.weight_decay.load() != 0.0;
    if (adapts && norms[0] != 0.0 && norms[1] != 0.0) {
      const double low = params.min_trust_ratio.load();
      const double high = params.max_trust_ratio.load();
      trust = norms[0] / norms[1];
      if (trust < low) trust = low;
      if (trust > high) trust = high;
    }
    coefs.minus_lr = round_to<T>(-params.lr.load() * trust);
  }

  ///   u = m / bias1 / (sqrt(v) / sqrt(bias2) + eps) + decay p
  template <class V, class T>
  TORCHFUSE_HOST_DEVICE static V change(V param, const V (&state)[kNumStates],
                                        const Coefs<T>& coefs) {
    const V denominator = fma(sqrt(state[1]), V(coefs.inverse_sqrt_bias2), V(coefs.eps));
    return fma(V(coefs.decay), param, state[0] / denominator * V(coefs.inverse_bias1));
  }

  ///   g  = +-grad + l2_decay p
  ///   m += (1 - beta1) (grad_weight g - m)      v += (1 - beta2) (g^2 - v)
  template <class V, class T>
  TORCHFUSE_HOST_DEVICE static void move(V param, V grad, V (&state)[kNumStates],
                                         const Coefs<T>& coefs) {
    const V g = fma(V(coefs.l2_decay), param, grad * V(coefs.grad_sign));
    // See Note [Decay rates of zero] in kernels/common/math.h.
    const V m = forgotten(coefs.one_minus_beta1) ? V(T(0)) : state[0];
    const V v = forgotten(coefs.one_minus_beta2) ? V(T(0)) : state[1];
    const V difference = fma(V(coefs.grad_weight), g, V(T(0)) - m);
    state[0] = fma(V(coefs.one_minus_beta1), difference, m);
    state[1] = fma(V(coefs.one_minus_beta2), fma(g, g, V(T(0)) - v), v);
  }

  /// Measures the states as stored, which the update reads.
  template <class V, class T>
  TORCHFUSE_HOST_DEVICE static void measure(V param, V /*grad*/, V (&state)[kNumStates],
                                            const Coefs<T>& coefs, V (&measured)[kNumNorms]) {
    measured[0] = param;
    measured[1] = change(param, state, coefs);
  }

  ///   p -= lr trust u
  template <class V, class T>
  TORCHFUSE_HOST_DEVICE static void update(V& param, V /*grad*/, V (&state)[kNumStates],
                                           const Coefs<T>& coefs) {
    param = fma(V(coefs.minus_lr), change(param, state, coefs), param);
  }
};

}  // namespace torchfuse::kernels
