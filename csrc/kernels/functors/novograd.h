// SPDX-License-Identifier: BSD-3-Clause
// NovoGrad (Ginsburg et al. 2019, "Stochastic gradient methods with layer-wise adaptive moments for
// training of deep networks"), in apex's variants. Each tensor has a running norm instead of a
// second moment per element.
#pragma once

#include "kernels/common/hyper_param.h"
#include "kernels/common/macros.h"
#include "kernels/common/math.h"

namespace torchfuse::kernels {

struct NovoGradParams {
  ScalarParam lr;
  ScalarParam beta1;
  ScalarParam beta2;
  ScalarParam eps;
  ScalarParam weight_decay;
  bool bias_correction = true;
  bool grad_averaging = true;      ///< the gradient enters the moment with 1 - beta1, else with 1
  bool reg_inside_moment = false;  ///< include weight decay in the first moment
  bool inf_norm = false;           ///< track the largest magnitude instead of the L2 norm
  bool init_zero = false;          ///< start the norm at 0 instead of the first gradient's norm
  bool maximize = false;
};

struct NovoGrad {
  using Params = NovoGradParams;
  static constexpr const char* kName = "novograd";
  static constexpr HyperParamEntry<Params> kHyperParams[] = {
      {"lr", &Params::lr},
      {"beta1", &Params::beta1, kDecayRate},
      {"beta2", &Params::beta2, kDecayRate},
      {"weight_decay", &Params::weight_decay},
      {"eps", &Params::eps},
      {"bias_correction", &Params::bias_correction},
      {"grad_averaging", &Params::grad_averaging},
      {"reg_inside_moment", &Params::reg_inside_moment},
      {"inf_norm", &Params::inf_norm},
      {"init_zero", &Params::init_zero},
      {"maximize", &Params::maximize},
  };
  static constexpr const char* kStateNames[] = {"exp_avg", "exp_avg_norm"};
  static constexpr int kNumStates = 1;  ///< exp_avg; the running norm is a per-tensor state
  static constexpr int kNumNorms = 1;   ///< norm of the gradient
  static constexpr bool kStatesInMeasure = false;
  static constexpr bool kTracksNorm = true;

  TORCHFUSE_HOST_DEVICE static bool uses_state(const Params&, int) { return true; }

  /// apply_norms() completes the first two when the norm is known.
  template <class T>
  struct Coefs {
    T grad_factor;      ///< +-1; divided by the denominator if reg_inside_moment
    T minus_lr;         ///< minus_rate; divided by the denominator otherwise
    T minus_rate;       ///< -lr / (1 - beta1^step)
    T inverse_bias2;    ///< 1 / sqrt(1 - beta2^step)
    T moment_decay;     ///< weight_decay inside the moment, else 0
    T minus_lr_decay;   ///< -lr weight_decay outside of the moment, else 0
    T one_minus_beta1;  ///< with grad_weight: m += (1 - beta1) (grad_weight g - m)
    T grad_weight;
  };

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
    coefs.grad_factor = params.maximize ? T(-1) : T(1);
    coefs.minus_rate = coefs.minus_lr = round_to<T>(-lr / bias1);
    coefs.inverse_bias2 = round_to<T>(1.0 / kernels::sqrt(bias2));
    coefs.moment_decay = params.reg_inside_moment ? round_to<T>(weight_decay) : T(0);
    coefs.minus_lr_decay = params.reg_inside_moment ? T(0) : round_to<T>(-lr * weight_decay);
    coefs.one_minus_beta1 = round_to<T>(1.0 - beta1);
    coefs.grad_weight = params.grad_averaging ? T(1) : round_to<T>(1.0 / (1.0 - beta1));
    return coefs;
  }

  /// The next running norm, without squaring numbers that are very large or very small.
  ///   n = sqrt(beta2 n^2 + (1 - beta2) |g|^2)      (L2)
  ///   n = beta2 n + (1 - beta2) max|g|             (inf_norm)
  ///   n = the gradient's norm in the first step, but for init_zero
  TORCHFUSE_HOST_DEVICE static double track(const Params& params, double step, double l2,
                                            double largest, double previous) {
    const double norm = params.inf_norm ? largest : l2;
    if (step == 1.0 && !params.init_zero) return norm;
    const double beta2 = params.beta2.load();
    if (params.inf_norm) return fma(beta2, previous, (1.0 - beta2) * norm);
    const double scale = previous > norm ? previous : norm;
    if (scale == 0.0) return 0.0;
    const double a = previous / scale;
    const double b = norm / scale;
    return scale * kernels::sqrt(fma(beta2, a * a, (1.0 - beta2) * (b * b)));
  }

  /// If the denominator is 0, all gradients are 0, and the tensor does not move along them.
  template <class T>
  TORCHFUSE_HOST_DEVICE static void apply_norms(const Params& params, const double* norms,
                                                Coefs<T>& coefs) {
    const double denominator =
        fma(norms[0], static_cast<double>(coefs.inverse_bias2), params.eps.load());
    const double inverse = denominator == 0.0 ? 0.0 : 1.0 / denominator;
    if (params.reg_inside_moment) {
      coefs.grad_factor = round_to<T>(params.maximize ? -inverse : inverse);
    } else {
      coefs.minus_lr = round_to<T>(static_cast<double>(coefs.minus_rate) * inverse);
    }
  }

  template <class V, class T>
  TORCHFUSE_HOST_DEVICE static void measure(V /*param*/, V grad, V (& /*state*/)[kNumStates],
                                            const Coefs<T>& /*coefs*/, V (&measured)[kNumNorms]) {
    measured[0] = grad;
  }

  ///   g  = grad_factor grad + moment_decay p
  ///   m += (1 - beta1) (grad_weight g - m)
  ///   p -= lr m / ... + lr decay p
  template <class V, class T>
  TORCHFUSE_HOST_DEVICE static void update(V& param, V grad, V (&state)[kNumStates],
                                           const Coefs<T>& coefs) {
    const V g = fma(V(coefs.moment_decay), param, grad * V(coefs.grad_factor));
    // See Note [Decay rates of zero] in kernels/common/math.h.
    const V m = forgotten(coefs.one_minus_beta1) ? V(T(0)) : state[0];
    const V difference = fma(V(coefs.grad_weight), g, V(T(0)) - m);
    state[0] = fma(V(coefs.one_minus_beta1), difference, m);
    // Sum both changes before adding them to the parameter, so that only one rounding is at the
    // parameter's magnitude.
    const V change = state[0] * V(coefs.minus_lr);
    param = param + fma(V(coefs.minus_lr_decay), param, change);
  }
};

}  // namespace torchfuse::kernels
