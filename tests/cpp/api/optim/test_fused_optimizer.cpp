// SPDX-License-Identifier: BSD-3-Clause
// What all fused optimizers share: threads, ownership of parameters and states, masters that follow
// their parameters, and errors by group and place.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstddef>
#include <thread>
#include <utility>
#include <vector>

#include <torchfuse/optim/fused_adam.h>

#include "optim_testing.h"

namespace torchfuse::optim {
namespace {

using testing::expect_error;
using testing::make_params;
using testing::options_of;
using testing::set_grads;
using testing::state_of;
using torch::optim::OptimizerParamGroup;

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

TEST(FusedOptimizer, StatesAreLaidOutAnewWithTheirParameter) {
  const torch::Tensor param = torch::randn({4, 3, 5, 6}).requires_grad_();
  const torch::Tensor twin = param.detach().clone().requires_grad_();
  FusedAdam optimizer({param}, FusedAdamOptions(1e-2).weight_decay(0.0));
  torch::optim::Adam reference({twin}, torch::optim::AdamOptions(1e-2));
  for (int i = 0; i < 4; ++i) {
    set_grads({param}, i);
    set_grads({twin}, i);
    optimizer.step();
    reference.step();
    const auto format = i % 2 == 0 ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
    param.set_data(param.detach().contiguous(format));
  }
  testing::expect_close(param, twin);
}

TEST(FusedOptimizer, MastersFollowWritesToTheirParameters) {
  const torch::Tensor param = torch::randn({64}).to(torch::kBFloat16).requires_grad_();
  FusedAdam optimizer({param}, FusedAdamOptions(1e-3).master_weights(true));
  const auto step = [&](int seed) {
    set_grads({param}, seed);
    optimizer.step();
  };
  for (int i = 0; i < 3; ++i) step(i);
  options_of(optimizer).lr(0.0);
  FusedAdamParamState& state = state_of(optimizer, param);
  const torch::Tensor before = state.master_param().clone();
  {
    const torch::NoGradGuard no_grad;
    param.slice(0, 0, 8).fill_(100.0);
  }
  step(3);
  EXPECT_TRUE(torch::equal(state.master_param().slice(0, 0, 8), torch::full({8}, 100.0)));
  EXPECT_TRUE(torch::equal(state.master_param().slice(0, 8), before.slice(0, 8)));
  EXPECT_TRUE(torch::equal(param.slice(0, 0, 8), torch::full({8}, 100.0, torch::kBFloat16)));

  // Through data() no version moves.
  param.variable_data().slice(0, 0, 8).fill_(200.0);
  optimizer.remake_masters();
  EXPECT_TRUE(torch::equal(state.master_param().slice(0, 0, 8), torch::full({8}, 200.0)));
  EXPECT_TRUE(torch::equal(state.master_param().slice(0, 8), before.slice(0, 8)));
}

TEST(FusedOptimizer, AParameterThatBecomesFloatTakesItsMaster) {
  const torch::Tensor param = torch::randn({16}).to(at::kBFloat16).requires_grad_();
  FusedAdam optimizer({param}, FusedAdamOptions(1e-3).master_weights(true));
  param.mutable_grad() = torch::randn({16}).to(at::kBFloat16);
  optimizer.step();
  const auto state = [&]() -> FusedAdamParamState& {
    return static_cast<FusedAdamParamState&>(*optimizer.state().at(param.unsafeGetTensorImpl()));
  };
  const torch::Tensor master = state().master_param().clone();
  param.set_data(param.detach().to(at::kFloat));
  optimizer.load_state_dict(optimizer.state_dict());  // as saved between the two
  static_cast<FusedAdamOptions&>(optimizer.param_groups()[0].options()).lr(0.0);
  param.mutable_grad() = torch::zeros({16});
  optimizer.step();
  EXPECT_TRUE(torch::equal(param.detach(), master));
  EXPECT_FALSE(state().master_param().defined());
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

TEST(FusedOptimizer, ResultsAreThoseOfTheLastStep) {
  const std::vector<torch::Tensor> params = make_params();
  FusedAdam optimizer(params, FusedAdamOptions().skip_non_finite(true));
  EXPECT_FALSE(optimizer.last_step_skipped().defined());
  set_grads(params, 1);
  params[0].mutable_grad().fill_(INFINITY);
  optimizer.step();
  EXPECT_EQ(optimizer.last_step_skipped().item<float>(), 1.0f);
  for (const torch::Tensor& param : params) param.mutable_grad().reset();
  optimizer.step();
  EXPECT_EQ(optimizer.last_step_skipped().item<float>(), 0.0f);
  EXPECT_EQ(optimizer.grad_norm().item<float>(), 0.0f);
}

TEST(FusedOptimizer, OneThatWasMovedFromRefusesToStep) {
  FusedAdam first(make_params());
  FusedAdam second(std::move(first));
  expect_error([&] { first.step(); },  // NOLINT(bugprone-use-after-move)
               "FusedAdam: expected an optimizer, got one that was moved from");
  second.step();
}

}  // namespace
}  // namespace torchfuse::optim
