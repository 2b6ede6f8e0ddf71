// SPDX-License-Identifier: BSD-3-Clause
// The scaler's steps and scales. Training under it against the same without: test_class_steps.cpp.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/amp/grad_scaler.h>
#include <torchfuse/optim/fused_adam.h>

#include <vector>

#include "amp_testing.h"

namespace torchfuse::testing {
namespace {

using amp::GradScaler;
using amp::GradScalerOptions;
using optim::FusedAdam;
using optim::FusedAdamOptions;

TEST(GradScaler, ScalesOneAndManyTensors) {
  GradScaler scaler = make_scaler();
  const torch::Tensor weight = torch::full({3}, 2.0, torch::requires_grad());
  scaler.scale(weight.sum()).backward();
  EXPECT_TRUE(torch::equal(weight.grad(), torch::full({3}, 16.0)));
  const auto scaled =
      scaler.scale(std::vector<torch::Tensor>{torch::ones({}, torch::kHalf), torch::ones({2})});
  ASSERT_EQ(scaled.size(), 2U);
  EXPECT_EQ(scaled[0].scalar_type(), torch::kFloat);
  EXPECT_EQ(scaled[0].item<float>(), 16.0F);
  EXPECT_TRUE(torch::equal(scaled[1], torch::full({2}, 16.0)));
  expect_error([&] { scaler.scale(torch::Tensor()); },
               "GradScaler.scale: expected outputs to be a tensor, got an undefined one.");
}

TEST(GradScaler, ScaledLossesHaveGradientsOfGradients) {
  GradScaler scaler = make_scaler();
  const torch::Tensor weight = torch::full({3}, 2.0, torch::requires_grad());
  const auto grads = torch::autograd::grad({scaler.scale(weight.pow(3).sum())}, {weight}, {},
                                           /*retain_graph=*/true, /*create_graph=*/true);
  (grads[0] / 16).sum().backward();
  EXPECT_TRUE(torch::equal(weight.grad(), torch::full({3}, 12.0)));
}

TEST(GradScaler, StepsFusedAdamWithoutTouchingGradients) {
  for (const bool explicit_unscale : {false, true}) {
    const auto params = make_params();
    FusedAdam optimizer(params, FusedAdamOptions(1e-2));
    GradScaler scaler = started_scaler();
    set_grads(params, 1);
    if (explicit_unscale) scaler.unscale_(optimizer);
    std::vector<torch::Tensor> grads;
    for (const torch::Tensor& param : params) grads.push_back(param.grad());
    const auto before = copies(grads);
    scaler.step(optimizer);
    expect_equal(grads, before);
    EXPECT_EQ(optimizer.last_step_skipped().item<float>(), 0.0F);
  }
}

TEST(GradScaler, TheScaleFollowsItsOptions) {
  using Options = GradScalerOptions;
  struct Case {
    Options options;
    std::vector<bool> overflows;
    std::vector<double> scales;
  };
  const std::vector<Case> cases{
      {Options().init_scale(16.0).growth_interval(2),
       {false, false, false, true, false, false},
       {16, 32, 32, 16, 16, 32}},
      {Options().init_scale(64.0).hysteresis(2),
       {true, false, true, true, false},
       {64, 64, 64, 32, 32}},
      {Options().init_scale(8.0).growth_interval(1).min_scale(3.0).max_scale(20.0),
       {true, true, true, false, false, false, false},
       {4, 3, 3, 6, 12, 20, 20}},
      // It stays where fp32 holds its reciprocal.
      {Options().init_scale(0x1p125).growth_interval(1), {false, false}, {0x1p126, 0x1p126}},
      {Options().init_scale(0x1p-100).growth_interval(1).backoff_factor(1e-46),
       {true, true, false},
       {0x1p-126, 0x1p-126, 0x1p-125}},
  };
  for (std::size_t index = 0; index < cases.size(); ++index) {
    const auto optimizer = kSgd(make_params());
    GradScaler scaler(torch::kCPU, cases[index].options);
    std::vector<double> scales;
    for (const bool overflow : cases[index].overflows) {
      iterate(scaler, *optimizer, overflow);
      scales.push_back(scaler.get_scale());
    }
    EXPECT_EQ(scales, cases[index].scales) << "case " << index;
  }
}

TEST(GradScaler, OverflowInOneOptimizerSkipsOnlyThatOne) {
  const auto first = make_params();
  const auto second = make_params();
  FusedAdam ours(first);
  torch::optim::SGD other(second, torch::optim::SGDOptions(0.1));
  GradScaler scaler = started_scaler();
  set_grads(first, 1);
  set_grads(second, 1);
  first[0].mutable_grad().view(-1)[0] = kInf;
  const auto first_before = copies(first);
  const auto second_before = copies(second);
  scaler.step(ours);
  scaler.step(other);
  scaler.update();
  expect_equal(first, first_before);
  EXPECT_FALSE(torch::equal(second[0], second_before[0]));
  EXPECT_EQ(scaler.get_scale(), 8.0);
}

}  // namespace
}  // namespace torchfuse::testing
