// SPDX-License-Identifier: BSD-3-Clause
// When each call is allowed, with torch's sentences, and what the scaler refuses.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/amp/grad_scaler.h>
#include <torchfuse/optim/fused_adam.h>

#include <cmath>
#include <string>
#include <type_traits>

#include "../optim/optim_testing.h"
#include "amp_testing.h"

namespace torchfuse::testing {
namespace {

using amp::GradScaler;
using amp::GradScalerOptions;
using optim::FusedAdam;

static_assert(!std::is_copy_constructible_v<GradScaler>);
static_assert(std::is_nothrow_move_constructible_v<GradScaler>);

TEST(GradScalerRules, HasTorchsDefaults) {
  const GradScaler scaler(torch::kCPU);
  EXPECT_TRUE(scaler.is_enabled());
  EXPECT_EQ(scaler.get_scale(), 65536.0);
  EXPECT_EQ(scaler.get_growth_factor(), 2.0);
  EXPECT_EQ(scaler.get_backoff_factor(), 0.5);
  EXPECT_EQ(scaler.get_growth_interval(), 2000);
  EXPECT_EQ(scaler.get_growth_tracker(), 0);
}

TEST(GradScalerRules, RefusesCallsOutOfOrder) {
  const auto params = make_params();
  set_grads(params, 1);
  FusedAdam optimizer(params);
  GradScaler scaler = make_scaler();
  const std::string unscaled = " but _scale is None.  This may indicate your script did not use";
  expect_error([&] { scaler.unscale_(optimizer); }, "Attempted unscale_" + unscaled);
  expect_error([&] { scaler.step(optimizer); }, "Attempted step" + unscaled);
  expect_error([&] { scaler.update(); }, "Attempted update" + unscaled);
  scaler.scale(torch::zeros({}));
  expect_error([&] { scaler.update(); },
               "No inf checks were recorded prior to update. Call scaler.step(), with gradients.");
  scaler.unscale_(optimizer);
  expect_error([&] { scaler.unscale_(optimizer); },
               "unscale_() has already been called on this optimizer since the last update().");
  scaler.step(optimizer);
  expect_error([&] { scaler.unscale_(optimizer); }, "unscale_() is being called after step().");
  expect_error([&] { scaler.step(optimizer); },
               "step() has already been called since the last update().");
  scaler.update();
  scaler.step(optimizer);
  scaler.update();
  EXPECT_EQ(scaler.get_growth_tracker(), 2);
}

TEST(GradScalerRules, RefusesClosures) {
  const auto params = make_params();
  set_grads(params, 1);
  GradScaler scaler = started_scaler();
  torch::optim::SGD other(params, torch::optim::SGDOptions(0.1));
  FusedAdam ours(params);
  for (torch::optim::Optimizer* optimizer : {static_cast<torch::optim::Optimizer*>(&ours),
                                             static_cast<torch::optim::Optimizer*>(&other)}) {
    expect_error([&] { scaler.step(*optimizer, [] { return torch::zeros({}); }); },
                 "Closure use is not currently supported if GradScaler is enabled.");
    scaler.step(*optimizer);
  }
  scaler.update();
  // The scaler's request ends with the step.
  EXPECT_EQ(ours.step([] { return torch::ones({}); }).item<float>(), 1.0F);
}

TEST(GradScalerRules, RefusesStepsWithoutGradients) {
  const auto params = make_params();
  torch::optim::SGD other(params, torch::optim::SGDOptions(0.1));
  FusedAdam ours(params);
  GradScaler scaler = started_scaler();
  expect_error([&] { scaler.step(other); }, "No inf checks were recorded for this optimizer.");
  scaler.step(ours);
  expect_error([&] { scaler.update(); }, "No inf checks were recorded prior to update.");
}

TEST(GradScalerRules, RefusesToUnscaleHalfGradients) {
  const auto params = make_params(torch::kHalf);
  set_grads(params, 1);
  FusedAdam optimizer(params);
  GradScaler scaler = started_scaler();
  expect_error([&] { scaler.unscale_(optimizer); }, "Attempting to unscale FP16 gradients.");
  scaler.step(optimizer);
  scaler.update();
  EXPECT_EQ(optimizer.last_step_skipped().item<float>(), 0.0F);
}

TEST(GradScalerRules, UnscalesSparseGradients) {
  const torch::Tensor table = torch::zeros({5, 2}, torch::requires_grad());
  const torch::Tensor indices = torch::tensor({{3, 1, 3}});
  table.mutable_grad() = torch::sparse_coo_tensor(indices, torch::ones({3, 2}), {5, 2});
  torch::optim::SGD optimizer({table}, torch::optim::SGDOptions(0.1));
  GradScaler scaler = started_scaler(4.0);
  scaler.unscale_(optimizer);
  EXPECT_EQ(table.grad().to_dense()[3][0].item<float>(), 0.5F);
}

TEST(GradScalerRules, GoesOnAfterAStepThatFailed) {
  const torch::Tensor table = torch::zeros({4, 2}, torch::requires_grad());
  table.mutable_grad() = torch::ones({4, 2}).to_sparse();
  FusedAdam stranger({table});
  const auto params = make_params();
  FusedAdam optimizer(params);
  GradScaler scaler = started_scaler();
  expect_error([&] { scaler.step(stranger); }, "expected grad of params[0] of group 0 to be dense");
  expect_error([&] { scaler.update(); }, "No inf checks were recorded prior to update.");
  set_grads(params, 1);
  params[0].mutable_grad().view(-1)[0] = kInf;
  scaler.step(optimizer);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 8.0);
}

TEST(GradScalerRules, TakesANewScale) {
  GradScaler scaler = started_scaler();
  scaler.update(3.0);
  EXPECT_EQ(scaler.get_scale(), 3.0);
  const torch::Tensor new_scale = torch::full({1}, 5.0);
  scaler.update(new_scale);
  new_scale.fill_(7.0);
  EXPECT_EQ(scaler.get_scale(), 5.0);
  for (const torch::Tensor& bad :
       {torch::ones({2}), torch::ones({}, torch::requires_grad()), torch::Tensor()}) {
    expect_error([&] { scaler.update(bad); }, "new_scale should be a float or a 1-element");
  }
  EXPECT_EQ(scaler.get_scale(), 5.0);
}

TEST(GradScalerRules, SettersCheckTheirValues) {
  GradScaler scaler = make_scaler();
  scaler.set_growth_factor(3.0);
  scaler.set_backoff_factor(0.25);
  scaler.set_growth_interval(7);
  expect_error([&] { scaler.set_growth_factor(1.0); }, "The growth factor must be > 1.0.");
  expect_error([&] { scaler.set_growth_factor(NAN); }, "The growth factor must be > 1.0.");
  expect_error([&] { scaler.set_backoff_factor(1.0); }, "The backoff factor must be < 1.0.");
  expect_error([&] { scaler.set_growth_interval(0); },
               "GradScaler: expected growth_interval to be at least 1, got 0.");
  EXPECT_EQ(scaler.get_growth_factor(), 3.0);
  EXPECT_EQ(scaler.get_backoff_factor(), 0.25);
  EXPECT_EQ(scaler.get_growth_interval(), 7);
  expect_error([] { GradScaler(torch::kCPU, GradScalerOptions().growth_factor(0.5)); },
               "The growth factor must be > 1.0.");
}

TEST(GradScalerRules, DisabledPassesThrough) {
  const auto params = make_params();
  const auto reference = copy_of(params);
  set_grads(params, 1);
  set_grads(reference, 1);
  GradScaler scaler(torch::kCPU, GradScalerOptions().enabled(false).growth_factor(0.0));
  FusedAdam optimizer(params);
  const torch::Tensor outputs = torch::ones({2});
  EXPECT_TRUE(scaler.scale(outputs).is_same(outputs));
  scaler.unscale_(optimizer);
  EXPECT_EQ(scaler.step(optimizer, [] { return torch::ones({}); }).item<float>(), 1.0F);
  scaler.update();
  FusedAdam(reference).step();
  expect_equal(params, reference);
  EXPECT_EQ(scaler.get_scale(), 1.0);
  EXPECT_FALSE(scaler.state_dict().has_value());
  scaler.load_state_dict({});
}

TEST(GradScalerRules, IsDisabledWhereCudaIsMissing) {
  if (torch::cuda::is_available()) GTEST_SKIP() << "needs a machine without CUDA";
  EXPECT_FALSE(GradScaler(torch::kCUDA).is_enabled());
}

}  // namespace
}  // namespace torchfuse::testing
