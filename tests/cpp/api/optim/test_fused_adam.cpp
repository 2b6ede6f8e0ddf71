// SPDX-License-Identifier: BSD-3-Clause
// FusedAdam against torch::optim::Adam and AdamW, and its use in training loops.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include <torchfuse/optim/fused_adam.h>

#include "optim_testing.h"

namespace torchfuse::optim {
namespace {

using testing::copy_of;
using testing::expect_close;
using testing::expect_equal;
using testing::make_params;
using testing::set_grads;
using testing::state_of;
using torch::optim::OptimizerParamGroup;

std::unique_ptr<torch::optim::Optimizer> torch_optimizer(const std::vector<torch::Tensor>& params,
                                                         bool adam_w_mode, bool amsgrad,
                                                         double weight_decay) {
  if (adam_w_mode) {
    return std::make_unique<torch::optim::AdamW>(
        params, torch::optim::AdamWOptions(2e-3).weight_decay(weight_decay).amsgrad(amsgrad));
  }
  return std::make_unique<torch::optim::Adam>(
      params, torch::optim::AdamOptions(2e-3).weight_decay(weight_decay).amsgrad(amsgrad));
}

using AdamCase = std::tuple<bool, bool, double, torch::ScalarType>;

class FusedAdamParity : public ::testing::TestWithParam<AdamCase> {};

TEST_P(FusedAdamParity, MatchesTorchOver100Steps) {
  const auto [adam_w_mode, amsgrad, weight_decay, dtype] = GetParam();
  const auto params = make_params(dtype);
  const auto expected = copy_of(params);
  FusedAdam optimizer(
      params,
      FusedAdamOptions(2e-3).adam_w_mode(adam_w_mode).amsgrad(amsgrad).weight_decay(weight_decay));
  const auto reference = torch_optimizer(expected, adam_w_mode, amsgrad, weight_decay);
  for (int i = 0; i < 100; ++i) {
    set_grads(params, i);
    set_grads(expected, i);
    optimizer.step();
    reference->step();
  }
  expect_close(params, expected);
  EXPECT_EQ(state_of(optimizer, params[0]).step().item<float>(), 100.0f);
  EXPECT_EQ(state_of(optimizer, params[0]).max_exp_avg_sq().defined(), amsgrad);
}

INSTANTIATE_TEST_SUITE_P(Modes, FusedAdamParity,
                         ::testing::Combine(::testing::Bool(), ::testing::Bool(),
                                            ::testing::Values(0.0, 0.05),
                                            ::testing::Values(torch::kFloat, torch::kDouble)));

TEST(FusedAdam, MaximizeWithoutBiasCorrectionMatchesTheFormula) {
  const auto params = make_params();
  FusedAdam optimizer(params, FusedAdamOptions(2e-3).maximize(true).bias_correction(false));
  const torch::NoGradGuard no_grad;
  torch::Tensor p = params[0].detach().to(torch::kDouble);
  torch::Tensor m = torch::zeros_like(p);
  torch::Tensor v = torch::zeros_like(p);
  for (int i = 0; i < 100; ++i) {
    set_grads(params, i);
    const torch::Tensor g = -params[0].grad().to(torch::kDouble);
    m = 0.9 * m + 0.1 * g;
    v = 0.999 * v + 0.001 * g * g;
    p = p - 2e-3 * m / (v.sqrt() + 1e-8);
    optimizer.step();
  }
  expect_close(params[0], p);
}

// Against fp64: in fp32, torch rounds 1 - lr * weight_decay, which adds up to 3e-6 in 100 steps.
TEST(FusedAdam, MastersOf16BitParametersFollowFp64) {
  const auto params = make_params(torch::kBFloat16);
  std::vector<torch::Tensor> expected;
  for (const auto& param : params) {
    expected.push_back(param.detach().to(torch::kDouble).requires_grad_(true));
  }
  FusedAdam optimizer(params, FusedAdamOptions(2e-3).weight_decay(0.01).master_weights(true));
  torch::optim::AdamW reference(expected, torch::optim::AdamWOptions(2e-3).weight_decay(0.01));
  for (int i = 0; i < 100; ++i) {
    set_grads(params, i);
    for (std::size_t k = 0; k < params.size(); ++k) {
      expected[k].mutable_grad() = params[k].grad().to(torch::kDouble);
    }
    optimizer.step();
    reference.step();
  }
  for (std::size_t k = 0; k < params.size(); ++k) {
    const FusedAdamParamState& state = state_of(optimizer, params[k]);
    expect_close(state.master_param(), expected[k]);
    EXPECT_TRUE(torch::equal(params[k], state.master_param().to(torch::kBFloat16)));
    EXPECT_EQ(state.exp_avg().scalar_type(), torch::kFloat);
  }
}

TEST(FusedAdam, GroupsWithoutOptionsInheritTheDefaults) {
  const auto params = make_params();
  const auto expected = copy_of(params);
  const auto groups = [](const std::vector<torch::Tensor>& p, auto options) {
    std::vector<OptimizerParamGroup> result;
    result.emplace_back(std::vector<torch::Tensor>{p[0], p[1]});
    result.emplace_back(std::vector<torch::Tensor>{});
    result.emplace_back(std::vector<torch::Tensor>{p[2], p[3], p[4]}, std::move(options));
    return result;
  };
  using Options = torch::optim::AdamWOptions;
  FusedAdam optimizer(
      groups(params, std::make_unique<FusedAdamOptions>(FusedAdamOptions(1e-2).weight_decay(0.1))),
      FusedAdamOptions(2e-3).weight_decay(0.02));
  torch::optim::AdamW reference(
      groups(expected, std::make_unique<Options>(Options(1e-2).weight_decay(0.1))),
      Options(2e-3).weight_decay(0.02));
  for (int i = 0; i < 20; ++i) {
    set_grads(params, i);
    set_grads(expected, i);
    optimizer.step();
    reference.step();
  }
  expect_close(params, expected);
}

TEST(FusedAdam, TakesGroupsAndGradientsThatAppearLater) {
  const auto params = make_params();
  const auto expected = copy_of(params);
  FusedAdam optimizer(std::vector<torch::Tensor>{params[0], params[1]}, FusedAdamOptions(2e-3));
  torch::optim::AdamW reference(std::vector<torch::Tensor>{expected[0], expected[1]},
                                torch::optim::AdamWOptions(2e-3).weight_decay(0.0));
  for (int i = 0; i < 12; ++i) {
    if (i == 4) {
      optimizer.add_param_group(OptimizerParamGroup({params[3], params[4]}));
      reference.add_param_group(OptimizerParamGroup({expected[3], expected[4]}));
    }
    set_grads(params, i);
    set_grads(expected, i);
    const std::size_t absent = i < 6 ? 1 : 3;  // params[1] starts late, params[3] pauses
    params[absent].mutable_grad() = torch::Tensor();
    expected[absent].mutable_grad() = torch::Tensor();
    optimizer.step();
    reference.step();
  }
  expect_close(params, expected);
  EXPECT_EQ(state_of(optimizer, params[0]).step().item<float>(), 12.0f);
  EXPECT_EQ(state_of(optimizer, params[1]).step().item<float>(), 6.0f);
  EXPECT_EQ(state_of(optimizer, params[3]).step().item<float>(), 2.0f);
}

TEST(FusedAdam, DoesNothingWithoutGradients) {
  const auto params = make_params();
  const auto before = copy_of(params);
  FusedAdam optimizer(params);
  optimizer.step();
  expect_equal(params, before);
  EXPECT_TRUE(optimizer.state().empty());
  EXPECT_EQ(optimizer.last_step_skipped().item<float>(), 0.0f);
}

TEST(FusedAdam, CallsTheClosureWithGradientsEnabled) {
  const auto params = make_params();
  FusedAdam optimizer(params, FusedAdamOptions(1e-2));
  const auto closure = [&] {
    optimizer.zero_grad();
    torch::Tensor loss = torch::zeros({});
    for (const auto& param : params) loss = loss + param.square().sum();
    loss.backward();
    return loss.detach();
  };
  const torch::NoGradGuard no_grad;
  const double first = optimizer.step(closure).item<double>();
  const double second = optimizer.step(closure).item<double>();
  EXPECT_LT(second, first);
}

TEST(FusedAdam, ObeysSchedulersAndEditedOptions) {
  const auto params = make_params();
  const auto expected = copy_of(params);
  FusedAdam optimizer(params, FusedAdamOptions(1e-2));
  torch::optim::AdamW reference(expected, torch::optim::AdamWOptions(1e-2).weight_decay(0.0));
  torch::optim::StepLR schedule(optimizer, 5, 0.5);
  torch::optim::StepLR reference_schedule(reference, 5, 0.5);
  for (int i = 0; i < 20; ++i) {
    if (i == 10) {
      static_cast<FusedAdamOptions&>(optimizer.param_groups()[0].options()).weight_decay(0.1);
      static_cast<torch::optim::AdamWOptions&>(reference.param_groups()[0].options())
          .weight_decay(0.1);
    }
    set_grads(params, i);
    set_grads(expected, i);
    optimizer.step();
    reference.step();
    schedule.step();
    reference_schedule.step();
  }
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(),
            reference.param_groups()[0].options().get_lr());
  EXPECT_LT(optimizer.param_groups()[0].options().get_lr(), 1e-2);
  expect_close(params, expected);
}

TEST(FusedAdam, UsesReplacedStatesAndNewOptionsAtOnce) {
  const auto params = make_params();
  FusedAdam optimizer(params);
  set_grads(params, 0);
  optimizer.step();
  auto& state =
      static_cast<FusedAdamParamState&>(*optimizer.state().at(params[0].unsafeGetTensorImpl()));
  const torch::Tensor former = state.exp_avg();
  const torch::Tensor kept = former.clone();
  const torch::Tensor replacement = torch::zeros_like(former);
  state.exp_avg(replacement);
  static_cast<FusedAdamOptions&>(optimizer.param_groups()[0].options()).amsgrad(true);
  optimizer.step();
  EXPECT_TRUE(torch::equal(former, kept));
  EXPECT_FALSE(torch::equal(replacement, torch::zeros_like(replacement)));
  EXPECT_TRUE(state.exp_avg().is_same(replacement));
  EXPECT_TRUE(torch::equal(state.max_exp_avg_sq(), state.exp_avg_sq()));
}

TEST(FusedAdam, ClipsTheGlobalNormAndLeavesGradients) {
  const auto params = make_params();
  const auto expected = copy_of(params);
  FusedAdam optimizer(params, FusedAdamOptions(2e-3).max_grad_norm(0.5));
  torch::optim::AdamW reference(expected, torch::optim::AdamWOptions(2e-3).weight_decay(0.0));
  for (int i = 0; i < 20; ++i) {
    set_grads(params, i);
    set_grads(expected, i);
    const torch::Tensor grad = params[0].grad().clone();
    const double norm = torch::nn::utils::clip_grad_norm_(expected, 0.5);
    optimizer.step();
    reference.step();
    EXPECT_NEAR(optimizer.grad_norm().item<double>(), norm, 1e-5 * norm);
    EXPECT_TRUE(torch::equal(params[0].grad(), grad));
  }
  expect_close(params, expected);
}

TEST(FusedAdam, SkipsNonFiniteGradientsOnRequestOnly) {
  for (const bool skip : {false, true}) {
    const auto params = make_params();
    const auto before = copy_of(params);
    FusedAdam optimizer(params, FusedAdamOptions(2e-3).skip_non_finite(skip));
    set_grads(params, 0);
    params[4].grad().view(-1)[209] = std::numeric_limits<float>::infinity();
    optimizer.step();
    EXPECT_EQ(optimizer.last_step_skipped().item<float>(), skip ? 1.0f : 0.0f);
    EXPECT_EQ(torch::equal(params[0], before[0]), skip);
    EXPECT_EQ(state_of(optimizer, params[0]).step().item<float>(), skip ? 0.0f : 1.0f);
  }
}

TEST(FusedAdam, CanBeMoved) {
  const auto params = make_params();
  const auto expected = copy_of(params);
  FusedAdam first(params);
  set_grads(params, 0);
  first.step();
  FusedAdam second = std::move(first);
  set_grads(params, 1);
  second.step();
  FusedAdam reference(expected);
  for (int i = 0; i < 2; ++i) {
    set_grads(expected, i);
    reference.step();
  }
  expect_equal(params, expected);
}

}  // namespace
}  // namespace torchfuse::optim
