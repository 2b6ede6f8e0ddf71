// SPDX-License-Identifier: BSD-3-Clause
// Every class against its formula in fp64, with options that differ from their defaults: each class
// passes its own options to its own algorithm.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include <torchfuse/torchfuse.h>

#include "optim_testing.h"

namespace torchfuse::optim {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace): all helpers
using torch::Tensor;

double bias(bool corrects, double beta, int step) {
  return corrects ? 1.0 - std::pow(beta, step) : 1.0;
}

struct AdamFormula {
  using Optimizer = FusedAdam;
  FusedAdamOptions options;
  Tensor param;
  Tensor mean = torch::zeros_like(param);
  Tensor square = torch::zeros_like(param);
  Tensor largest = torch::zeros_like(param);
  int step = 0;

  void update(Tensor grad) {
    ++step;
    const auto [beta1, beta2] = options.betas();
    if (options.maximize()) grad = -grad;
    if (!options.adam_w_mode()) grad = grad + options.weight_decay() * param;
    mean = beta1 * mean + (1 - beta1) * grad;
    square = beta2 * square + (1 - beta2) * grad * grad;
    largest = torch::maximum(largest, square);
    const Tensor root =
        ((options.amsgrad() ? largest : square) / bias(options.bias_correction(), beta2, step))
            .sqrt();
    Tensor change = mean / bias(options.bias_correction(), beta1, step) / (root + options.eps());
    if (options.adam_w_mode()) change = change + options.weight_decay() * param;
    param = param - options.lr() * change;
  }
};

struct LAMBFormula {
  using Optimizer = FusedLAMB;
  FusedLAMBOptions options;
  Tensor param;
  Tensor mean = torch::zeros_like(param);
  Tensor square = torch::zeros_like(param);
  int step = 0;

  void update(Tensor grad) {
    ++step;
    const auto [beta1, beta2] = options.betas();
    const double decay = options.weight_decay();
    if (!options.adam_w_mode()) grad = grad + decay * param;
    mean = beta1 * mean + (options.grad_averaging() ? 1 - beta1 : 1.0) * grad;
    square = beta2 * square + (1 - beta2) * grad * grad;
    const Tensor root = (square / bias(options.bias_correction(), beta2, step)).sqrt();
    Tensor change = mean / bias(options.bias_correction(), beta1, step) / (root + options.eps());
    if (options.adam_w_mode()) change = change + decay * param;
    double trust = 1.0;
    const double norm = param.norm().item<double>();
    const double change_norm = change.norm().item<double>();
    if ((options.use_nvlamb() || decay != 0.0) && norm != 0.0 && change_norm != 0.0) {
      const double highest =
          options.max_trust_ratio().value_or(std::numeric_limits<double>::infinity());
      trust = std::clamp(norm / change_norm, options.min_trust_ratio(), highest);
    }
    param = param - options.lr() * trust * change;
  }
};

struct NovoGradFormula {
  using Optimizer = FusedNovoGrad;
  FusedNovoGradOptions options;
  Tensor param;
  Tensor moment = torch::zeros_like(param);
  double norm = 0.0;
  int step = 0;

  void update(Tensor grad) {
    ++step;
    const auto [beta1, beta2] = options.betas();
    if (options.maximize()) grad = -grad;
    const double size = grad.numel() == 0          ? 0.0
                        : options.norm_type() == 0 ? grad.abs().max().item<double>()
                                                   : grad.norm().item<double>();
    if (step == 1 && !options.init_zero()) {
      norm = size;
    } else if (options.norm_type() == 0) {
      norm = beta2 * norm + (1 - beta2) * size;
    } else {
      norm = std::sqrt(beta2 * norm * norm + (1 - beta2) * size * size);
    }
    const double bias1 = bias(options.bias_correction(), beta1, step);
    const double bias2 = bias(options.bias_correction(), beta2, step);
    const double denominator = norm / std::sqrt(bias2) + options.eps();
    const double share = options.grad_averaging() ? 1 - beta1 : 1.0;
    const double decay = options.weight_decay();
    if (options.reg_inside_moment()) {
      moment = beta1 * moment + share * (grad / denominator + decay * param);
      param = param - options.lr() * moment / bias1;
    } else {
      moment = beta1 * moment + share * grad;
      param = param - options.lr() * (moment / bias1 / denominator + decay * param);
    }
  }
};

struct LARSFormula {
  using Optimizer = FusedLARS;
  FusedLARSOptions options;
  Tensor param;
  Tensor buffer = torch::zeros_like(param);

  void update(Tensor grad) {
    if (options.maximize()) grad = -grad;
    const double size = param.norm().item<double>();
    const double slope = grad.norm().item<double>();
    double rate = options.lr();
    if (size != 0.0 && slope != 0.0) {
      rate *= options.trust_coefficient() * size /
              (slope + options.weight_decay() * size + options.eps());
    }
    const Tensor change = rate * (grad + options.weight_decay() * param);
    buffer = options.momentum() * buffer + change;
    param = param - (options.nesterov() ? change + options.momentum() * buffer : buffer);
  }
};

struct SGDFormula {
  using Optimizer = FusedSGD;
  FusedSGDOptions options;
  Tensor param;
  Tensor buffer = {};

  void update(Tensor grad) {
    const Tensor decay = options.weight_decay() * param;
    if (options.maximize()) grad = -grad;
    if (!options.wd_after_momentum()) grad = grad + decay;
    const double momentum = options.momentum();
    buffer = buffer.defined() ? momentum * buffer + (1 - options.dampening()) * grad : grad;
    Tensor change = options.nesterov() ? grad + momentum * buffer : buffer;
    if (momentum == 0.0) change = grad;
    if (options.wd_after_momentum()) change = change + decay;
    param = param - options.lr() * change;
  }
};

struct AdagradFormula {
  using Optimizer = FusedAdagrad;
  FusedAdagradOptions options;
  Tensor param;
  Tensor sum = torch::full_like(param, options.initial_accumulator_value());
  int step = 0;

  void update(Tensor grad) {
    const double rate = options.lr() / (1 + options.lr_decay() * step++);
    const Tensor decay = options.weight_decay() * param;
    if (options.maximize()) grad = -grad;
    if (!options.adagrad_w_mode()) grad = grad + decay;
    sum = sum + grad * grad;
    Tensor change = grad / (sum.sqrt() + options.eps());
    if (options.adagrad_w_mode()) change = change + decay;
    param = param - rate * change;
  }
};

struct LionFormula {
  using Optimizer = FusedLion;
  FusedLionOptions options;
  Tensor param;
  Tensor momentum = torch::zeros_like(param);

  void update(Tensor grad) {
    const auto [beta1, beta2] = options.betas();
    if (options.maximize()) grad = -grad;
    const Tensor direction = (beta1 * momentum + (1 - beta1) * grad).sign();
    momentum = beta2 * momentum + (1 - beta2) * grad;
    param = param - options.lr() * (options.weight_decay() * param + direction);
  }
};

/// 100 steps, each with masters where the parameters have 16 bits.
template <class Formula>
void expect_follows(std::vector<decltype(Formula::options)> all) {
  for (std::size_t index = 0; index < all.size(); ++index) {
    auto& options = all[index].master_weights(true).max_grad_norm(std::nullopt);
    for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kBFloat16}) {
      SCOPED_TRACE(c10::str("options ", index, ", ", dtype));
      const auto params = make_params(dtype);
      typename Formula::Optimizer optimizer(params, options);
      std::vector<Formula> formulas;
      for (const Tensor& param : params) {
        formulas.push_back({options, param.detach().to(torch::kDouble, false, /*copy=*/true)});
      }
      for (int step = 0; step < 100; ++step) {
        set_grads(params, step);
        optimizer.step();
        for (std::size_t i = 0; i < params.size(); ++i) {
          formulas[i].update(params[i].grad().to(torch::kDouble));
        }
      }
      for (std::size_t i = 0; i < params.size(); ++i) {
        const Tensor& master = state_of(optimizer, params[i]).master_param();
        ASSERT_EQ(master.defined(), dtype == torch::kBFloat16);
        expect_close(master.defined() ? master : params[i], formulas[i].param);
        EXPECT_TRUE(!master.defined() || torch::equal(params[i], master.to(dtype)));
        EXPECT_EQ(state_of(optimizer, params[i]).step().template item<float>(), 100.0f);
      }
    }
  }
}

TEST(ClassFormulas, FusedAdam) {
  using Options = FusedAdamOptions;
  expect_follows<AdamFormula>({Options(2e-3).weight_decay(0.05),
                               Options(2e-3).adam_w_mode(false).weight_decay(0.05),
                               Options(2e-3).amsgrad(true).betas({0.8, 0.95}).eps(1e-4),
                               Options(2e-3).maximize(true).bias_correction(false)});
}

TEST(ClassFormulas, FusedLAMB) {
  using Options = FusedLAMBOptions;
  expect_follows<LAMBFormula>({Options(1e-3), Options(1e-3).weight_decay(0.0),
                               Options(1e-3).weight_decay(0.0).use_nvlamb(true),
                               Options(1e-3).adam_w_mode(false).bias_correction(false),
                               Options(1e-3).grad_averaging(false).betas({0.8, 0.95}),
                               Options(1e-3).min_trust_ratio(0.1).max_trust_ratio(0.5)});
}

TEST(ClassFormulas, FusedNovoGrad) {
  using Options = FusedNovoGradOptions;
  expect_follows<NovoGradFormula>({Options(1e-3)
                                       .betas({0.95, 0.98})
                                       .bias_correction(false)
                                       .grad_averaging(false)
                                       .reg_inside_moment(true)
                                       .weight_decay(1e-3),
                                   Options(1e-3).weight_decay(0.01),
                                   Options(2e-4).norm_type(0).init_zero(true).maximize(true)});
}

TEST(ClassFormulas, FusedLARS) {
  using Options = FusedLARSOptions;
  expect_follows<LARSFormula>(
      {Options(0.2).weight_decay(0.05), Options(0.2).nesterov(true).maximize(true).eps(1.0),
       Options(0.02).momentum(0.0).trust_coefficient(0.02).weight_decay(0.01)});
}

TEST(ClassFormulas, FusedSGD) {
  using Options = FusedSGDOptions;
  expect_follows<SGDFormula>(
      {Options(2e-4).weight_decay(0.05), Options(2e-4).momentum(0.9).dampening(0.1),
       Options(2e-4).momentum(0.9).nesterov(true).weight_decay(0.05),
       Options(2e-4).momentum(0.9).weight_decay(0.05).wd_after_momentum(true).maximize(true)});
}

TEST(ClassFormulas, FusedAdagrad) {
  using Options = FusedAdagradOptions;
  expect_follows<AdagradFormula>(
      {Options(1e-3).lr_decay(0.01).initial_accumulator_value(0.5).weight_decay(0.05),
       Options(1e-3).weight_decay(0.05).adagrad_w_mode(true).maximize(true)});
}

TEST(ClassFormulas, FusedLion) {
  using Options = FusedLionOptions;
  expect_follows<LionFormula>(
      {Options(1e-3).weight_decay(0.1), Options(1e-3).betas({0.8, 0.95}).maximize(true)});
}

}  // namespace
}  // namespace torchfuse::optim
