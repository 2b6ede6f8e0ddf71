// SPDX-License-Identifier: BSD-3-Clause
// FusedNovoGrad against its formula in fp64; the norm as a state: archives, errors.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <torchfuse/amp/grad_scaler.h>
#include <torchfuse/optim/fused_novograd.h>

#include "optim_testing.h"

namespace torchfuse::optim {
namespace {

using testing::copy_of;
using testing::expect_close;
using testing::expect_equal;
using testing::expect_error;
using testing::load;
using testing::make_params;
using testing::run_steps;
using testing::saved;
using testing::set_grads;
using testing::state_of;

/// The paper's own form.
FusedNovoGradOptions paper() {
  return FusedNovoGradOptions(1e-2)
      .betas({0.95, 0.98})
      .bias_correction(false)
      .grad_averaging(false)
      .reg_inside_moment(true)
      .weight_decay(1e-3);
}

/// One tensor in fp64.
struct NovoGradReference {
  torch::Tensor param, moment;
  double norm = 0.0;
  int step = 0;

  void update(const FusedNovoGradOptions& options, const torch::Tensor& scaled) {
    ++step;
    const auto [beta1, beta2] = options.betas();
    const torch::Tensor grad = options.maximize() ? -scaled : scaled;
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
    const double bias1 = options.bias_correction() ? 1 - std::pow(beta1, step) : 1.0;
    const double bias2 = options.bias_correction() ? 1 - std::pow(beta2, step) : 1.0;
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

void expect_follows_the_formula(const FusedNovoGradOptions& options, torch::ScalarType dtype) {
  const auto params = make_params(dtype);
  FusedNovoGrad optimizer(params, options);
  std::vector<NovoGradReference> references;
  for (const auto& param : params) {
    const torch::Tensor start = param.detach().to(torch::kDouble).clone();
    references.push_back({start, torch::zeros_like(start)});
  }
  for (int i = 0; i < 100; ++i) {
    set_grads(params, i);
    optimizer.step();
    for (std::size_t k = 0; k < params.size(); ++k) {
      references[k].update(options, params[k].grad().to(torch::kDouble));
    }
  }
  for (std::size_t k = 0; k < params.size(); ++k) {
    const FusedNovoGradParamState& state = state_of(optimizer, params[k]);
    const bool master = state.master_param().defined();
    ASSERT_EQ(master, dtype == torch::kBFloat16);
    expect_close(master ? state.master_param() : params[k], references[k].param);
    EXPECT_EQ(state.step().item<float>(), 100.0f);
    ASSERT_EQ(state.exp_avg_norm().dim(), 0);
    EXPECT_EQ(state.exp_avg_norm().scalar_type(),
              dtype == torch::kDouble ? torch::kDouble : torch::kFloat);
    EXPECT_NEAR(state.exp_avg_norm().item<double>(), references[k].norm, 1e-6 * references[k].norm);
  }
}

TEST(FusedNovoGrad, FollowsTheFormulaOver100Steps) {
  std::vector<FusedNovoGradOptions> all{
      paper().lr(1e-3), FusedNovoGradOptions(1e-3).weight_decay(0.01),
      FusedNovoGradOptions(2e-4).norm_type(0).init_zero(true).maximize(true)};
  for (FusedNovoGradOptions& options : all) {
    for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kBFloat16}) {
      expect_follows_the_formula(options.master_weights(true), dtype);
    }
  }
}

TEST(FusedNovoGrad, ASkippedFirstStepIsNotTheFirst) {
  const auto params = make_params();
  const auto expected = copy_of(params);
  FusedNovoGrad optimizer(params, paper().skip_non_finite(true));
  FusedNovoGrad reference(expected, paper());
  set_grads(params, 0);
  params[4].grad().view(-1)[209] = std::numeric_limits<float>::infinity();
  optimizer.step();
  EXPECT_EQ(optimizer.last_step_skipped().item<float>(), 1.0f);
  EXPECT_EQ(state_of(optimizer, params[0]).exp_avg_norm().item<float>(), 0.0f);
  run_steps(optimizer, params, 1, 4);
  run_steps(reference, expected, 1, 4);
  expect_equal(params, expected);
}

TEST(FusedNovoGrad, ScaledAndClippedStepsEqualPlainOnes) {
  const auto params = make_params();
  const auto copies = copy_of(params);
  const FusedNovoGradOptions options = paper().max_grad_norm(1.0);
  FusedNovoGrad optimizer(params, options);
  FusedNovoGrad plain(copies, options);
  amp::GradScaler scaler(torch::kCPU);
  const auto loss_of = [](const std::vector<torch::Tensor>& tensors) {
    torch::Tensor loss = torch::zeros({});
    for (const auto& tensor : tensors) loss = loss + tensor.square().sum();
    return loss;
  };
  for (int i = 0; i < 5; ++i) {
    optimizer.zero_grad();
    scaler.scale(loss_of(params)).backward();
    scaler.step(optimizer);
    scaler.update();
    plain.zero_grad();
    loss_of(copies).backward();
    plain.step();
  }
  expect_equal(params, copies);
}

TEST(FusedNovoGrad, TheNumberOfParametersWithGradientsMayChange) {
  const auto params = make_params();
  const auto copies = copy_of(params);
  FusedNovoGrad together(params, paper());
  FusedNovoGrad alone(std::vector<torch::Tensor>{copies[0]}, paper());
  for (int i = 0; i < 6; ++i) {
    set_grads(params, i);
    copies[0].mutable_grad() = params[0].grad().clone();
    if (i % 2 == 0) params[3].mutable_grad() = torch::Tensor();
    together.step();
    alone.step();
  }
  EXPECT_TRUE(torch::equal(params[0], copies[0]));
  EXPECT_EQ(state_of(together, params[3]).step().item<float>(), 3.0f);
}

TEST(FusedNovoGradArchive, ANormThatIsNoNumberOfTheParametersTypeIsRefused) {
  for (const torch::Tensor& norm :
       {torch::ones({37, 5}), torch::ones({}, torch::kDouble), torch::ones({1})}) {
    const auto params = make_params();
    FusedNovoGrad optimizer(params, paper());
    run_steps(optimizer, params, 0, 2);
    state_of(optimizer, params[0]).exp_avg_norm(norm);
    const std::string bytes = saved(optimizer);
    FusedNovoGrad other(copy_of(params));
    expect_error([&] { load(other, bytes); },
                 "expected the archive's param_groups[0].state[0].exp_avg_norm to be a 0-dim Float "
                 "tensor for a Float parameter, got a " +
                     std::to_string(norm.dim()) + "-dim ");
    EXPECT_TRUE(other.state().empty());
  }
}

TEST(FusedNovoGrad, AStateWithoutANormIsRefused) {
  const auto params = make_params();
  FusedNovoGrad optimizer(params, paper());
  run_steps(optimizer, params, 0, 1);
  state_of(optimizer, params[1]).exp_avg_norm(torch::Tensor());
  const auto before = copy_of(params);
  set_grads(params, 1);
  expect_error([&] { optimizer.step(); },
               "FusedNovoGrad: expected the state of a parameter of sizes [1] to have all of step, "
               "exp_avg and exp_avg_norm");
  expect_equal(params, before);
}

TEST(FusedNovoGradOptions, OutOfRangeValuesAreRefusedByName) {
  const auto construct = [](const FusedNovoGradOptions& options) {
    return [options] { FusedNovoGrad optimizer(make_params(), options); };
  };
  expect_error(construct(FusedNovoGradOptions().betas({1.0, 0.9})),
               "defaults.betas[0] to be at least 0 and less than 1, got 1");
  expect_error(construct(FusedNovoGradOptions().betas({0.9, -0.1})),
               "defaults.betas[1] to be at least 0 and less than 1");
  expect_error(construct(FusedNovoGradOptions().eps(-1.0)),
               "defaults.eps to be at least 0 and finite");
  expect_error(construct(FusedNovoGradOptions().norm_type(1)),
               "defaults.norm_type to be 2 or 0 (the largest magnitude), got 1");
}

}  // namespace
}  // namespace torchfuse::optim
