// SPDX-License-Identifier: BSD-3-Clause
// LARS (You, Gitman and Ginsburg 2017, "Large batch training of convolutional networks",
// Algorithm 1).
#pragma once

#include "kernels/common/hyper_param.h"
#include "kernels/common/macros.h"
#include "kernels/common/math.h"

namespace torchfuse::kernels {

struct LarsParams {
  ScalarParam lr;
  ScalarParam momentum;
  ScalarParam weight_decay;
  ScalarParam trust_coefficient;
  ScalarParam eps;
  bool nesterov = false;
  bool maximize = false;
};

struct Lars {
  using Params = LarsParams;
  static constexpr const char* kName = "lars";
  static constexpr HyperParamEntry<Params> kHyperParams[] = {
      {"lr", &Params::lr},
      {"momentum", &Params::momentum},
      {"weight_decay", &Params::weight_decay},
      {"trust_coefficient", &Params::trust_coefficient},
      {"eps", &Params::eps},
      {"nesterov", &Params::nesterov},
      {"maximize", &Params::maximize},
  };
  static constexpr const char* kStateNames[] = {"momentum_buffer"};
  static constexpr int kNumStates = 1;
  static constexpr int kNumNorms = 2;  ///< norms of the parameter and its gradient
  static constexpr bool kStatesInMeasure = false;
  static constexpr bool kTracksNorm = false;

  TORCHFUSE_HOST_DEVICE static bool uses_state(const Params&, int) { return true; }

  template <class T>
  struct Coefs {
    T grad_sign;
    T weight_decay;
    T momentum;
    T lr;  ///< times the local rate, once the norms are known
    bool nesterov;
  };

  template <class T>
  TORCHFUSE_HOST_DEVICE static Coefs<T> prepare(const Params& params, double /*step*/) {
    Coefs<T> coefs;
    coefs.grad_sign = params.maximize ? T(-1) : T(1);
    coefs.weight_decay = round_to<T>(params.weight_decay.load());
    coefs.momentum = round_to<T>(params.momentum.load());
    coefs.lr = round_to<T>(params.lr.load());
    coefs.nesterov = params.nesterov;
    return coefs;
  }

  ///   local = trust_coefficient |p| / (|g| + weight_decay |p| + eps), 1 if either norm is 0
  template <class T>
  TORCHFUSE_HOST_DEVICE static void apply_norms(const Params& params, const double* norms,
                                                Coefs<T>& coefs) {
    double local = 1.0;
    if (norms[0] != 0.0 && norms[1] != 0.0) {
      const double decayed = fma(params.weight_decay.load(), norms[0], norms[1]);
      local = params.trust_coefficient.load() * norms[0] / (decayed + params.eps.load());
    }
    coefs.lr = round_to<T>(params.lr.load() * local);
  }

  template <class V, class T>
  TORCHFUSE_HOST_DEVICE static void measure(V param, V grad, V (& /*state*/)[kNumStates],
                                            const Coefs<T>& /*coefs*/, V (&measured)[kNumNorms]) {
    measured[0] = param;
    measured[1] = grad;
  }

  ///   d  = lr local (+-grad + weight_decay p)
  ///   b  = momentum b + d
  ///   p -= d + momentum b (nesterov), else b
  template <class V, class T>
  TORCHFUSE_HOST_DEVICE static void update(V& param, V grad, V (&state)[kNumStates],
                                           const Coefs<T>& coefs) {
    const V decayed = fma(V(coefs.weight_decay), param, grad * V(coefs.grad_sign));
    const V descent = decayed * V(coefs.lr);
    state[0] = fma(V(coefs.momentum), state[0], descent);
    const V change = coefs.nesterov ? fma(V(coefs.momentum), state[0], descent) : state[0];
    param = param - change;
  }
};

}  // namespace torchfuse::kernels
