// SPDX-License-Identifier: BSD-3-Clause
// Every optimizer's hyper-parameters by mode, whose bits are its flags, and its formula in fp64.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "kernels/common/tensor_table.h"
#include "kernels/functors/adagrad.h"
#include "kernels/functors/adam.h"
#include "kernels/functors/lamb.h"
#include "kernels/functors/lars.h"
#include "kernels/functors/lion.h"
#include "kernels/functors/muon.h"
#include "kernels/functors/novograd.h"
#include "kernels/functors/sgd.h"
#include "kernels/fused_optimizer.h"

namespace torchfuse::kernels::testing {

using Optimizers =
    ::testing::Types<Adagrad, Adam, Lamb, Lars, Lion, MuonMomentum, MuonUpdate, NovoGrad, Sgd>;
using LayerwiseOptimizers = ::testing::Types<Lamb, Lars, NovoGrad>;

/// Whether a step reads gradients, in any of its phases.
template <class Functor>
constexpr bool kReadsGrad = Layerwise<Functor> || !kStatesInMeasure<Functor>;

/// One tensor in fp64; the gradient is unscaled.
struct ExactTensor {
  std::vector<double> param, grad, state[kMaxStates];
  double tracked = 0.0;
};

inline double norm_of(const std::vector<double>& values) {
  double sum = 0.0;
  for (const double value : values) sum += value * value;
  return std::sqrt(sum);
}

inline double largest_of(const std::vector<double>& values) {
  double largest = 0.0;
  for (const double value : values) largest = std::max(largest, std::abs(value));
  return largest;
}

template <class Functor>
struct OptimizerCase;

/// "adam"; the passes of an optimizer have names of their own.
struct OptimizerName {
  template <class Functor>
  static std::string GetName(int) {
    if constexpr (requires { Functor::kName; }) {
      return Functor::kName;
    } else {
      return OptimizerCase<Functor>::kName;
    }
  }
};

template <>
struct OptimizerCase<Adagrad> {
  static constexpr int kModes = 8;
  static std::vector<int> some_modes() { return {1, 2, 4}; }

  static AdagradParams group(int mode) {
    AdagradParams group;
    group.lr.value = 0.05;
    group.lr_decay.value = (mode & 1) != 0 ? 0.1 : 0.0;
    group.eps.value = 1e-10;
    group.weight_decay.value = 0.1;
    group.adagrad_w_mode = (mode & 2) != 0;
    group.maximize = (mode & 4) != 0;
    return group;
  }

  static void step(const AdagradParams& group, double step, ExactTensor& tensor) {
    for (std::size_t i = 0; i < tensor.param.size(); ++i) {
      double& p = tensor.param[i];
      double& sum = tensor.state[0][i];
      const double decay = group.weight_decay.value * p;
      const double g = (group.maximize ? -1 : 1) * tensor.grad[i];
      const double whole = g + (group.adagrad_w_mode ? 0.0 : decay);
      sum += whole * whole;
      const double direction =
          whole / (std::sqrt(sum) + group.eps.value) + (group.adagrad_w_mode ? decay : 0.0);
      p -= group.lr.value / (1.0 + (step - 1.0) * group.lr_decay.value) * direction;
    }
  }
};

template <>
struct OptimizerCase<Adam> {
  static constexpr int kModes = 16;
  static std::vector<int> some_modes() { return {11, 8, 14}; }

  static AdamParams group(int mode) {
    AdamParams group;
    group.lr.value = 1e-2;
    group.beta1.value = 0.9;
    group.beta2.value = 0.999;
    group.eps.value = 1e-8;
    group.weight_decay.value = 0.1;
    group.adam_w_mode = (mode & 1) != 0;
    group.amsgrad = (mode & 2) != 0;
    group.maximize = (mode & 4) != 0;
    group.bias_correction = (mode & 8) != 0;
    return group;
  }

  static void step(const AdamParams& group, double step, ExactTensor& tensor) {
    const double b1 = group.beta1.value;
    const double b2 = group.beta2.value;
    const double bias1 = group.bias_correction ? 1 - std::pow(b1, step) : 1;
    const double bias2 = group.bias_correction ? 1 - std::pow(b2, step) : 1;
    const double lr = group.lr.value;
    for (std::size_t i = 0; i < tensor.param.size(); ++i) {
      double& p = tensor.param[i];
      double& m = tensor.state[0][i];
      double& v = tensor.state[1][i];
      double& v_max = tensor.state[2][i];
      double g = tensor.grad[i] * (group.maximize ? -1 : 1);
      if (!group.adam_w_mode) g += group.weight_decay.value * p;
      if (group.adam_w_mode) p *= 1 - lr * group.weight_decay.value;
      m = b1 * m + (1 - b1) * g;
      v = b2 * v + (1 - b2) * g * g;
      v_max = std::max(v_max, v);
      const double second_moment = group.amsgrad ? v_max : v;
      p -= lr * (m / bias1) / (std::sqrt(second_moment / bias2) + group.eps.value);
    }
  }
};

template <>
struct OptimizerCase<Lamb> {
  static constexpr int kModes = 16;
  static std::vector<int> some_modes() { return {0, 6, 9}; }

  static LambParams group(int mode) {
    LambParams group;
    group.lr.value = 0.05;
    group.beta1.value = 0.9;
    group.beta2.value = 0.99;
    group.adam_w_mode = (mode & 1) == 0;
    group.eps.value = (mode & 1) != 0 ? 0.0 : 1e-6;  // 0 / 0 beyond the end must not be measured
    group.grad_averaging = (mode & 2) == 0;
    group.maximize = (mode & 2) != 0;
    group.max_trust_ratio.value = (mode & 2) != 0 ? 0.5 : 10.0;
    group.weight_decay.value = (mode & 4) != 0 ? 0.0 : 0.1;
    group.use_nvlamb = (mode & 8) != 0;
    group.bias_correction = (mode & 8) == 0;
    return group;
  }

  static void step(const LambParams& group, double step, ExactTensor& tensor) {
    const double b1 = group.beta1.value;
    const double b2 = group.beta2.value;
    const double decay = group.weight_decay.value;
    const double bias1 = group.bias_correction ? 1 - std::pow(b1, step) : 1;
    const double bias2 = group.bias_correction ? 1 - std::pow(b2, step) : 1;
    std::vector<double> change;
    for (std::size_t i = 0; i < tensor.param.size(); ++i) {
      const double p = tensor.param[i];
      double& m = tensor.state[0][i];
      double& v = tensor.state[1][i];
      double g = tensor.grad[i] * (group.maximize ? -1 : 1);
      if (!group.adam_w_mode) g += decay * p;
      m = b1 * m + (group.grad_averaging ? 1 - b1 : 1) * g;
      v = b2 * v + (1 - b2) * g * g;
      change.push_back(m / bias1 / (std::sqrt(v / bias2) + group.eps.value) +
                       (group.adam_w_mode ? decay * p : 0.0));
    }
    double trust = 1.0;
    if (decay != 0.0 || group.use_nvlamb) {
      trust = std::clamp(norm_of(tensor.param) / norm_of(change), group.min_trust_ratio.value,
                         group.max_trust_ratio.value);
    }
    for (std::size_t i = 0; i < change.size(); ++i) {
      tensor.param[i] -= group.lr.value * trust * change[i];
    }
  }
};

template <>
struct OptimizerCase<Lars> {
  static constexpr int kModes = 4;
  static std::vector<int> some_modes() { return {0, 3}; }

  static LarsParams group(int mode) {
    LarsParams group;
    group.lr.value = 2.0;
    group.momentum.value = (mode & 1) != 0 ? 0.9 : 0.5;
    group.weight_decay.value = (mode & 2) != 0 ? 0.1 : 0.0;
    group.trust_coefficient.value = 0.01;
    group.eps.value = 1e-8;
    group.nesterov = (mode & 1) != 0;
    group.maximize = (mode & 2) != 0;
    return group;
  }

  static void step(const LarsParams& group, double /*step*/, ExactTensor& tensor) {
    const double size = norm_of(tensor.param);
    const double slope = norm_of(tensor.grad);
    const double decay = group.weight_decay.value;
    double rate = group.lr.value;
    if (size > 0.0 && slope > 0.0) {
      rate *= group.trust_coefficient.value * size / (slope + decay * size + group.eps.value);
    }
    for (std::size_t i = 0; i < tensor.param.size(); ++i) {
      const double g = group.maximize ? -tensor.grad[i] : tensor.grad[i];
      const double change = rate * (g + decay * tensor.param[i]);
      double& b = tensor.state[0][i];
      b = group.momentum.value * b + change;
      tensor.param[i] -= group.nesterov ? change + group.momentum.value * b : b;
    }
  }
};

template <>
struct OptimizerCase<Lion> {
  static constexpr int kModes = 4;
  static std::vector<int> some_modes() { return {0, 3}; }

  static LionParams group(int mode) {
    LionParams group;
    group.lr.value = 0.05;
    group.beta1.value = 0.875;  // no rounding that could change the sign of a sum near 0
    group.beta2.value = 0.99;
    group.weight_decay.value = (mode & 1) != 0 ? 0.1 : 0.0;
    group.maximize = (mode & 2) != 0;
    return group;
  }

  static void step(const LionParams& group, double /*step*/, ExactTensor& tensor) {
    for (std::size_t i = 0; i < tensor.param.size(); ++i) {
      double& p = tensor.param[i];
      double& m = tensor.state[0][i];
      const double g = group.maximize ? -tensor.grad[i] : tensor.grad[i];
      const double direction = std::lerp(g, m, group.beta1.value);
      m = std::lerp(g, m, group.beta2.value);
      const int sign = (direction > 0) - (direction < 0);
      p -= group.lr.value * (group.weight_decay.value * p + sign);
    }
  }
};

template <>
struct OptimizerCase<MuonMomentum> {
  static constexpr const char* kName = "muon_momentum";
  static constexpr int kModes = 4;
  static std::vector<int> some_modes() { return {1, 0, 3}; }

  static MuonParams group(int mode) {
    MuonParams group;
    group.momentum.value = (mode & 2) != 0 ? 0.0 : 0.95;
    group.nesterov = (mode & 1) != 0;
    return group;
  }

  static void step(const MuonParams& group, double /*step*/, ExactTensor& tensor) {
    const double momentum = group.momentum.value;
    for (std::size_t i = 0; i < tensor.param.size(); ++i) {
      double& m = tensor.state[0][i];
      m = std::lerp(tensor.grad[i], m, momentum);
      tensor.param[i] = group.nesterov ? std::lerp(tensor.grad[i], m, momentum) : m;
    }
  }
};

template <>
struct OptimizerCase<MuonUpdate> {
  static constexpr const char* kName = "muon_update";
  static constexpr int kModes = 4;
  static std::vector<int> some_modes() { return {0, 3}; }

  static MuonUpdateParams group(int mode) {
    MuonUpdateParams group;
    group.lr.value = 0.05;
    group.weight_decay.value = (mode & 1) != 0 ? 0.1 : 0.0;
    group.lr_factor = (mode & 2) != 0 ? 1.7 : 1.0;
    return group;
  }

  static void step(const MuonUpdateParams& group, double /*step*/, ExactTensor& tensor) {
    for (std::size_t i = 0; i < tensor.param.size(); ++i) {
      double& p = tensor.param[i];
      p -= group.lr.value * (group.weight_decay.value * p + group.lr_factor * tensor.state[0][i]);
    }
  }
};

template <>
struct OptimizerCase<NovoGrad> {
  static constexpr int kModes = 16;
  static std::vector<int> some_modes() { return {0, 6, 9}; }

  static NovoGradParams group(int mode) {
    NovoGradParams group;
    group.lr.value = 0.05;
    group.beta1.value = 0.9;
    group.beta2.value = 0.98;
    group.eps.value = 1e-8;
    group.weight_decay.value = 0.1;
    group.bias_correction = group.grad_averaging = (mode & 1) == 0;
    group.reg_inside_moment = (mode & 2) != 0;
    group.inf_norm = (mode & 4) != 0;
    group.init_zero = group.maximize = (mode & 8) != 0;
    return group;
  }

  static void step(const NovoGradParams& group, double step, ExactTensor& tensor) {
    const double b1 = group.beta1.value;
    const double b2 = group.beta2.value;
    const double norm = group.inf_norm ? largest_of(tensor.grad) : norm_of(tensor.grad);
    double& n = tensor.tracked;
    if (step == 1.0 && !group.init_zero) {
      n = norm;
    } else if (group.inf_norm) {
      n = b2 * n + (1 - b2) * norm;
    } else {
      n = std::sqrt(b2 * n * n + (1 - b2) * norm * norm);
    }
    const double bias1 = group.bias_correction ? 1 - std::pow(b1, step) : 1.0;
    const double bias2 = group.bias_correction ? 1 - std::pow(b2, step) : 1.0;
    const double denominator = n / std::sqrt(bias2) + group.eps.value;
    const double share = group.grad_averaging ? 1 - b1 : 1.0;
    const double lr = group.lr.value;
    for (std::size_t i = 0; i < tensor.param.size(); ++i) {
      const double g = group.maximize ? -tensor.grad[i] : tensor.grad[i];
      const double decay = group.weight_decay.value * tensor.param[i];
      double& m = tensor.state[0][i];
      m = b1 * m + share * (group.reg_inside_moment ? g / denominator + decay : g);
      tensor.param[i] -=
          group.reg_inside_moment ? lr * m / bias1 : lr * (m / bias1 / denominator + decay);
    }
  }
};

template <>
struct OptimizerCase<Sgd> {
  static constexpr int kModes = 16;
  static std::vector<int> some_modes() { return {0, 1, 3, 5, 9}; }

  static SgdParams group(int mode) {
    SgdParams group;
    group.lr.value = 0.05;
    group.momentum.value = (mode & 1) != 0 ? 0.9 : 0.0;
    group.dampening.value = 0.25;
    group.weight_decay.value = 0.1;
    group.nesterov = (mode & 2) != 0;
    group.wd_after_momentum = (mode & 4) != 0;
    group.maximize = (mode & 8) != 0;
    return group;
  }

  static void step(const SgdParams& group, double step, ExactTensor& tensor) {
    const double momentum = group.momentum.value;
    const double share = 1.0 - group.dampening.value;
    for (std::size_t i = 0; i < tensor.param.size(); ++i) {
      double& p = tensor.param[i];
      double& buffer = tensor.state[0][i];
      const double decay = group.weight_decay.value * p;
      double direction = (group.maximize ? -tensor.grad[i] : tensor.grad[i]) +
                         (group.wd_after_momentum ? 0.0 : decay);
      if (momentum != 0.0) {
        buffer = step == 1.0 ? direction : momentum * buffer + share * direction;
        direction = group.nesterov ? direction + momentum * buffer : buffer;
      }
      if (group.wd_after_momentum) direction += decay;
      p -= group.lr.value * direction;
    }
  }
};

/// Groups in some modes, for tensors that take them in turn.
template <class Functor>
std::vector<typename Functor::Params> some_groups() {
  std::vector<typename Functor::Params> groups;
  for (const int mode : OptimizerCase<Functor>::some_modes()) {
    groups.push_back(OptimizerCase<Functor>::group(mode));
  }
  return groups;
}

}  // namespace torchfuse::kernels::testing
