// SPDX-License-Identifier: BSD-3-Clause
// What all fused optimizers share, shown with one: groups, options and states that change, threads,
// ownership, masters that follow their parameters, and errors by group and place.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstddef>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <torchfuse/amp/grad_scaler.h>
#include <torchfuse/optim/fused_adam.h>

#include "optim_testing.h"

namespace torchfuse::optim {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace): all helpers
using torch::optim::OptimizerParamGroup;

TEST(FusedOptimizer, GroupsWithoutOptionsInheritTheDefaults) {
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
  run_steps(optimizer, params, 0, 20);
  run_steps(reference, expected, 0, 20);
  expect_close(params, expected);
}

TEST(FusedOptimizer, TakesGroupsAndGradientsThatAppearLater) {
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

TEST(FusedOptimizer, CallsTheClosureWithGradientsEnabled) {
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

// Equal gradients move each element by the rate, which the decay multiplies by an element of 1.
TEST(FusedOptimizer, ObeysSchedulersAndEditedOptions) {
  const torch::Tensor param = torch::ones({4}, torch::kDouble).requires_grad_();
  param.mutable_grad() = torch::full({4}, -1.0, torch::kDouble);
  FusedAdam optimizer({param}, FusedAdamOptions(0.5).eps(0.0));
  torch::optim::StepLR schedule(optimizer, 1, 0.5);
  optimizer.step();
  expect_close(param.detach(), torch::full({4}, 1.5, torch::kDouble));
  for (int step = 0; step < 2; ++step) schedule.step();  // torch's first one keeps the rate
  options_of(optimizer).weight_decay(0.5);
  optimizer.step();
  expect_close(param.detach(), torch::full({4}, 1.5 - 0.25 * 0.5 * 1.5 + 0.25, torch::kDouble));
}

TEST(FusedOptimizer, UsesReplacedStatesAndNewOptionsAtOnce) {
  const auto params = make_params();
  FusedAdam optimizer(params);
  set_grads(params, 0);
  optimizer.step();
  FusedAdamParamState& state = state_of(optimizer, params[0]);
  EXPECT_FALSE(state.max_exp_avg_sq().defined());
  const torch::Tensor former = state.exp_avg();
  const torch::Tensor kept = former.clone();
  const torch::Tensor replacement = torch::zeros_like(former);
  state.exp_avg(replacement);
  options_of(optimizer).amsgrad(true);
  optimizer.step();
  EXPECT_TRUE(torch::equal(former, kept));
  EXPECT_FALSE(torch::equal(replacement, torch::zeros_like(replacement)));
  EXPECT_TRUE(state.exp_avg().is_same(replacement));
  EXPECT_TRUE(torch::equal(state.max_exp_avg_sq(), state.exp_avg_sq()));
}

TEST(FusedOptimizer, NamesTheGroupWithBadOptionsAndWorksAfterwards) {
  const auto params = make_params();
  FusedAdam optimizer(std::vector<torch::Tensor>{params[0]});
  run_steps(optimizer, params, 0, 1);
  optimizer.add_param_group(OptimizerParamGroup(
      {params[1]}, std::make_unique<FusedAdamOptions>(FusedAdamOptions().eps(std::nan("")))));
  const auto before = copy_of(params);
  expect_error([&] { optimizer.step(); },
               "param_groups[1].eps to be at least 0 and finite, got nan");
  expect_equal(params, before);

  auto& options = static_cast<FusedAdamOptions&>(optimizer.param_groups()[1].options());
  options.eps(1e-8).max_grad_norm(1.0);
  expect_error([&] { optimizer.step(); },
               "param_groups[1].max_grad_norm to equal the optimizer's own");
  options.max_grad_norm(std::nullopt);
  run_steps(optimizer, params, 1, 2);
  EXPECT_FALSE(torch::equal(params[1], before[1]));
}

TEST(FusedOptimizer, RefusesWhatCannotBeAParameterGroup) {
  const auto params = make_params();
  expect_error([&] { FusedAdam optimizer({params[0], torch::Tensor()}); },
               "param_groups[0].params[1] to be a tensor, got an undefined one");
  std::vector<OptimizerParamGroup> foreign;
  foreign.emplace_back(params, std::make_unique<torch::optim::SGDOptions>(0.1));
  expect_error([&] { FusedAdam optimizer(foreign); },
               "param_groups[0].options to be FusedAdamOptions");
  FusedAdam twice(std::vector<torch::Tensor>{params[0], params[0]});
  set_grads(params, 0);
  expect_error([&] { twice.step(); },
               "param_groups[0].params[1] to be in the parameter groups once");
  EXPECT_TRUE(twice.state().empty());
}

TEST(FusedOptimizer, ThreadsShareOne) {
  constexpr int kThreads = 4;
  constexpr int kSteps = 300;
  const std::vector<torch::Tensor> params = make_params();
  set_grads(params, 1);
  FusedAdam optimizer(params, FusedAdamOptions(1e-4).max_grad_norm(1.0));
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int k = 0; k < kSteps; ++k) {
        optimizer.step();
        EXPECT_TRUE(optimizer.grad_norm().defined());
        EXPECT_EQ(optimizer.last_step_skipped().item<float>(), 0.0f);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(state_of(optimizer, params[0]).step().item<float>(), kThreads * kSteps);
}

TEST(FusedOptimizer, HoldsNothingBetweenSteps) {
  const std::vector<torch::Tensor> params = make_params();
  set_grads(params, 1);
  FusedAdam optimizer(params);
  const std::size_t before = params[0].use_count();
  optimizer.step();
  EXPECT_EQ(params[0].use_count(), before);
  EXPECT_EQ(params[0].weak_use_count(), 1u);
  FusedAdamParamState& state = state_of(optimizer, params[0]);
  EXPECT_EQ(state.exp_avg().use_count(), 1u);
  const c10::weak_intrusive_ptr<c10::StorageImpl> old(
      state.exp_avg().storage().getWeakStorageImpl());
  state.exp_avg(state.exp_avg().clone());
  EXPECT_TRUE(old.expired()) << "what was replaced is free at once";
  set_grads(params, 2);
  optimizer.step();
  EXPECT_EQ(state.step().item<float>(), 2.0f);
}

TEST(FusedOptimizer, MastersAreRemadeAfterWritesThroughData) {
  const torch::Tensor param = torch::randn({64}).to(torch::kBFloat16).requires_grad_();
  FusedAdam optimizer({param}, FusedAdamOptions(1e-3).master_weights(true));
  run_steps(optimizer, {param}, 0, 3);
  const torch::Tensor master = state_of(optimizer, param).master_param();
  const torch::Tensor before = master.clone();
  param.variable_data().slice(0, 0, 8).fill_(200.0);  // no version moves
  optimizer.remake_masters();
  EXPECT_TRUE(torch::equal(master.slice(0, 0, 8), torch::full({8}, 200.0)));
  EXPECT_TRUE(torch::equal(master.slice(0, 8), before.slice(0, 8)));
}

TEST(FusedOptimizer, AParameterThatBecomesFloatTakesItsMaster) {
  const torch::Tensor param = torch::randn({16}).to(at::kBFloat16).requires_grad_();
  FusedAdam optimizer({param}, FusedAdamOptions(1e-3).master_weights(true));
  run_steps(optimizer, {param}, 0, 1);
  const torch::Tensor master = state_of(optimizer, param).master_param().clone();
  param.set_data(param.detach().to(at::kFloat));
  optimizer.load_state_dict(optimizer.state_dict());  // as saved between the two
  options_of(optimizer).lr(0.0);
  param.mutable_grad() = torch::zeros({16});
  optimizer.step();
  EXPECT_TRUE(torch::equal(param.detach(), master));
  EXPECT_FALSE(state_of(optimizer, param).master_param().defined());
}

TEST(FusedOptimizer, AFrozenParameterOfAnyDtypeStandsStill) {
  for (const at::ScalarType dtype : {at::kByte, at::kLong, at::kBool, at::kComplexFloat}) {
    const torch::Tensor frozen = torch::ones({3}, dtype);
    const torch::Tensor param = torch::ones({3}).requires_grad_();
    FusedAdam optimizer({frozen, param}, FusedAdamOptions(0.5));
    param.mutable_grad() = torch::ones({3});
    optimizer.step();
    optimizer.load_state_dict(optimizer.state_dict());
    EXPECT_TRUE(torch::equal(frozen, torch::ones({3}, dtype)));
    EXPECT_FALSE(torch::equal(param, torch::ones({3})));
    EXPECT_EQ(optimizer.state().size(), 1U);
  }
}

TEST(FusedOptimizer, NamesGroupAndPlace) {
  const std::vector<torch::Tensor> params = make_params();
  FusedAdam optimizer(
      {OptimizerParamGroup({params[0]}), OptimizerParamGroup({params[1], params[3]})});
  set_grads(params, 1);
  params[3].mutable_grad() = torch::randn({129}).to_sparse();
  expect_error([&] { optimizer.step(); },
               "FusedAdam::step: expected grad of params[1] of group 1 to be dense");
  set_grads(params, 1);
  optimizer.step();
  params[3].storage().set_nbytes(4);
  expect_error([&] { optimizer.step(); },
               "FusedAdam::step: expected params[1] of group 1 to lie within its storage");
}

TEST(FusedOptimizer, AStepWithoutGradientsChangesNothing) {
  const std::vector<torch::Tensor> params = make_params();
  const auto before = copy_of(params);
  FusedAdam idle(params);
  EXPECT_FALSE(idle.last_step_skipped().defined());
  idle.step();
  EXPECT_EQ(idle.last_step_skipped().item<float>(), 0.0f);
  EXPECT_TRUE(idle.state().empty());
  expect_equal(params, before);
}

TEST(FusedOptimizer, GradientsThatAreNotFiniteAreTakenUnlessTheyShallBeSkipped) {
  const std::vector<torch::Tensor> params = make_params();
  FusedAdam optimizer(params);
  set_grads(params, 0);
  params[3].mutable_grad().fill_(INFINITY);
  optimizer.step();
  EXPECT_EQ(optimizer.last_step_skipped().item<float>(), 0.0f);
  EXPECT_EQ(state_of(optimizer, params[0]).step().item<float>(), 1.0f);
}

TEST(FusedOptimizer, AStepAboveAThresholdIsSkippedWithoutAnOverflow) {
  const auto params = make_params();
  FusedAdam optimizer(params, FusedAdamOptions(1e-2).skip_norm_above(0.0));
  amp::GradScaler scaler(torch::kCPU, amp::GradScalerOptions().init_scale(4.0));
  scaler.scale(torch::ones({}));
  set_grads(params, 0);
  const auto before = copy_of(params);
  scaler.step(optimizer);
  scaler.update();
  EXPECT_EQ(optimizer.last_step_skipped().item<double>(), 1.0);
  EXPECT_EQ(scaler.get_scale(), 4.0);
  expect_equal(params, before);
  // A threshold of the device takes the option's place, and is read in every step.
  const torch::Tensor threshold = torch::full({1}, 1e9);
  optimizer.set_skip_norm_above(threshold);
  optimizer.step();
  EXPECT_EQ(optimizer.last_step_skipped().item<double>(), 0.0);
  threshold.zero_();
  optimizer.step();
  EXPECT_EQ(optimizer.last_step_skipped().item<double>(), 1.0);
  for (const torch::Tensor& bad :
       {torch::ones({2}), torch::ones({1}).to_sparse(), torch::ones({1}, torch::kMeta),
        torch::ones({1}, torch::kLong)}) {
    EXPECT_THROW(optimizer.set_skip_norm_above(bad), c10::ValueError);
  }
  optimizer.set_skip_norm_above({});
  EXPECT_THROW(FusedAdam(params, FusedAdamOptions().skip_norm_above(-1.0)), c10::ValueError);
}

TEST(FusedOptimizer, LoadingWarnsIfItDisablesClipping) {
  const auto params = make_params();
  const auto saved = FusedAdam(params).state_dict();
  FusedAdam optimizer(params, FusedAdamOptions().max_grad_norm(1.0).skip_norm_above(9.0));
  Warnings warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  optimizer.load_state_dict(saved);
  ASSERT_EQ(warnings.texts.size(), 2u);
  EXPECT_NE(warnings.texts[0].find("max_grad_norm is now disabled"), std::string::npos);
  EXPECT_NE(warnings.texts[1].find("skip_norm_above is now disabled"), std::string::npos);
}

TEST(FusedOptimizer, AMovedFromOptimizerCannotBeUsedAndTheOtherContinues) {
  const auto params = make_params();
  const auto expected = copy_of(params);
  FusedAdam first(params);
  run_steps(first, params, 0, 1);
  FusedAdam second = std::move(first);
  // NOLINTBEGIN(bugprone-use-after-move)
  expect_error([&] { first.step(); }, "FusedAdam: expected an optimizer, got a moved-from object");
  // An archive of nothing would replace a good file.
  std::ostringstream file;
  expect_error([&] { torch::save(first, file); },
               "FusedAdam::save: expected an optimizer, got a moved-from object");
  expect_error([&] { first.state_dict(); },
               "FusedAdam::state_dict: expected an optimizer, got a moved-from object");
  expect_error([&] { first.load_state_dict(second.state_dict()); },
               "FusedAdam::load: expected an optimizer, got a moved-from object");
  // NOLINTEND(bugprone-use-after-move)
  run_steps(second, params, 1, 2);
  FusedAdam reference(expected);
  run_steps(reference, expected, 0, 2);
  expect_equal(params, expected);
}

}  // namespace
}  // namespace torchfuse::optim
