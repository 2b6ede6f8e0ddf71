// SPDX-License-Identifier: BSD-3-Clause
// Muon (Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"), and the
// AdamW update of the parameters that are not matrices.
//
// Note [Muon's passes]
// A matrix moves along its orthogonalized momentum, which no single pass over the elements can
// compute. So a step of Muon has three parts: MuonMomentum updates the momentum and writes the
// direction, ops/fused_step/newton_schulz.h orthogonalizes the directions, and MuonUpdate updates
// the parameters, with the results in the place of gradients. Muon itself only has the table of
// hyper-parameters. Groups without `use_muon` have Adam's pass.
#pragma once

#include <limits>

#include "kernels/common/hyper_param.h"
#include "kernels/common/macros.h"
#include "kernels/common/math.h"

namespace torchfuse::kernels {

struct MuonParams {
  ScalarParam lr;
  ScalarParam weight_decay;
  ScalarParam momentum;
  ScalarParam beta1;  ///< this and beta2: without use_muon only
  ScalarParam beta2;
  ScalarParam eps;   ///< smallest norm by which a matrix is divided; AdamW's without use_muon
  ScalarParam ns_a;  ///< coefficients of the Newton-Schulz iteration
  ScalarParam ns_b;
  ScalarParam ns_c;
  ScalarParam ns_steps;
  ScalarParam matrix_dims;  ///< number of last dimensions that form a matrix; 0: all
  bool nesterov = true;
  bool use_muon = true;
  bool polar_express = false;       ///< the coefficients of Amsel et al. 2025 replace ns_a to ns_c
  bool match_rms_adamw = false;     ///< factor of the learning rate: see lr_factor()
  bool spectral_unclamped = false;  ///< likewise
  bool ns_float32 = false;          ///< iterate in fp32, whatever the hardware
  bool ns_bfloat16 = false;         ///< iterate in bf16, whatever the hardware
  bool ns_batched = true;           ///< multiply matrices of one shape together
};

/// A number of any sign that the host reads, and that fp32 holds.
inline constexpr HyperParamRange kOnHost{.low = std::numeric_limits<double>::lowest(),
                                         .high = std::numeric_limits<float>::max(),
                                         .on_host = true};

struct Muon {
  using Params = MuonParams;
  static constexpr const char* kName = "muon";
  static constexpr HyperParamEntry<Params> kHyperParams[] = {
      {"lr", &Params::lr},
      {"weight_decay", &Params::weight_decay},
      {"momentum", &Params::momentum, kDecayRate},
      {"beta1", &Params::beta1, kDecayRate},
      {"beta2", &Params::beta2, kDecayRate},
      {"eps", &Params::eps, {.on_host = true}},
      {"ns_a", &Params::ns_a, kOnHost},
      {"ns_b", &Params::ns_b, kOnHost},
      {"ns_c", &Params::ns_c, kOnHost},
      {"ns_steps", &Params::ns_steps, {.low = 1.0, .high = 100.0, .on_host = true}},
      {"matrix_dims", &Params::matrix_dims, {.high = 65.0, .on_host = true}},
      {"nesterov", &Params::nesterov},
      {"use_muon", &Params::use_muon},
      {"polar_express", &Params::polar_express},
      {"match_rms_adamw", &Params::match_rms_adamw},
      {"spectral_unclamped", &Params::spectral_unclamped},
      {"ns_float32", &Params::ns_float32},
      {"ns_bfloat16", &Params::ns_bfloat16},
      {"ns_batched", &Params::ns_batched},
  };
  static constexpr const char* kStateNames[] = {"exp_avg", "exp_avg_sq", "momentum_buffer"};
  static constexpr int kNumStates = 3;
  static constexpr int kMomentum = 2;  ///< index of momentum_buffer

  static bool uses_state(const Params& params, int state) {
    return params.use_muon == (state == kMomentum);
  }

  /// Returns the factor by which the learning rate of a matrix grows:
  ///   original            sqrt(max(1, rows / columns))      (Jordan et al. 2024)
  ///   match_rms_adamw     0.2 sqrt(max(rows, columns))      (Liu et al. 2025)
  ///   spectral_unclamped  sqrt(rows / columns)
  static double lr_factor(const Params& params, double rows, double columns) {
    if (params.match_rms_adamw) return 0.2 * kernels::sqrt(rows > columns ? rows : columns);
    const double ratio = rows / columns;
    return kernels::sqrt(params.spectral_unclamped || ratio > 1.0 ? ratio : 1.0);
  }
};

/// The momentum, and the direction that is orthogonalized afterwards. The direction takes the
/// parameter's place in the table and is only written.
struct MuonMomentum {
  using Params = MuonParams;
  static constexpr int kNumStates = 1;  ///< momentum_buffer

  TORCHFUSE_HOST_DEVICE static bool uses_state(const Params&, int) { return true; }

  /// Aligned like one access of its size, because compilers copy 16 bytes at once.
  template <class T>
  struct alignas(2 * sizeof(T)) Coefs {
    T one_minus_momentum;
    bool nesterov;
  };

  template <class T>
  TORCHFUSE_HOST_DEVICE static Coefs<T> prepare(const Params& params, double /*step*/) {
    return {round_to<T>(1.0 - params.momentum.load()), params.nesterov};
  }

  ///   m += (1 - momentum) (g - m)
  ///   direction = m + (1 - momentum) (g - m)    (nesterov), else m
  template <class V, class T>
  TORCHFUSE_HOST_DEVICE static void update(V& direction, V grad, V (&state)[kNumStates],
                                           const Coefs<T>& coefs) {
    const V take = V(coefs.one_minus_momentum);
    // See Note [Decay rates of zero] in kernels/common/math.h.
    const V m = forgotten(coefs.one_minus_momentum) ? V(T(0)) : state[0];
    state[0] = fma(take, grad - m, m);
    direction = coefs.nesterov ? fma(take, grad - state[0], state[0]) : state[0];
  }
};

struct MuonUpdateParams {
  ScalarParam lr;
  ScalarParam weight_decay;
  double lr_factor = 1.0;
};

/// The parameters' update. The orthogonalized direction is the only state, and is only read.
struct MuonUpdate {
  using Params = MuonUpdateParams;
  static constexpr int kNumStates = 1;
  static constexpr bool kStatesInMeasure = true;

  TORCHFUSE_HOST_DEVICE static bool uses_state(const Params&, int) { return true; }

  /// See MuonMomentum::Coefs.
  template <class T>
  struct alignas(2 * sizeof(T)) Coefs {
    T minus_lr;
    T minus_lr_decay;
  };

  template <class T>
  TORCHFUSE_HOST_DEVICE static Coefs<T> prepare(const Params& params, double /*step*/) {
    const double lr = params.lr.load();
    return {round_to<T>(-lr * params.lr_factor), round_to<T>(-lr * params.weight_decay.load())};
  }

  ///   p -= lr weight_decay p + lr lr_factor direction
  template <class V, class T>
  TORCHFUSE_HOST_DEVICE static void update(V& param, V /*grad*/, V (&direction)[kNumStates],
                                           const Coefs<T>& coefs) {
    param = param + fma(V(coefs.minus_lr_decay), param, direction[0] * V(coefs.minus_lr));
  }
};

}  // namespace torchfuse::kernels
