// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/amp/grad_scaler.h>
#include <torchfuse/optim/fused_adam.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "../optim/optim_testing.h"
#include "amp_testing.h"

namespace torchfuse::testing {
namespace {

using amp::GradScaler;
using amp::GradScalerOptions;
using optim::FusedAdam;
using optim::FusedAdamOptions;
using optim::FusedAdamParamState;

void multiply_grads(const std::vector<torch::Tensor>& params, double factor) {
  const torch::NoGradGuard no_grad;
  for (const torch::Tensor& param : params) param.mutable_grad().mul_(factor);
}

std::vector<torch::Tensor> grads_of(const std::vector<torch::Tensor>& params) {
  std::vector<torch::Tensor> grads;
  for (const torch::Tensor& param : params) grads.push_back(param.grad());
  return copies(grads);
}

/// Every state tensor of an optimizer, copied.
std::vector<torch::Tensor> states_of(FusedAdam& optimizer) {
  std::vector<torch::Tensor> states;
  for (const torch::Tensor& param : optimizer.param_groups()[0].params()) {
    const auto& state =
        static_cast<const FusedAdamParamState&>(*optimizer.state().at(param.unsafeGetTensorImpl()));
    states.insert(states.end(), {state.step(), state.exp_avg(), state.exp_avg_sq()});
  }
  return copies(states);
}

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

TEST(GradScaler, StepsTorchsOptimizerWithUnscaledGradients) {
  for (const bool explicit_unscale : {false, true}) {
    const auto params = make_params();
    const auto reference = copy_of(params);
    torch::optim::SGD ours(params, torch::optim::SGDOptions(0.1));
    torch::optim::SGD plain(reference, torch::optim::SGDOptions(0.1));
    GradScaler scaler = started_scaler();
    set_grads(params, 1);
    set_grads(reference, 1);
    multiply_grads(params, 16.0);
    if (explicit_unscale) scaler.unscale_(ours);
    scaler.step(ours);
    scaler.update();
    plain.step();
    expect_equal(params, reference);
    expect_equal(grads_of(params), grads_of(reference));
  }
}

TEST(GradScaler, SkipsTorchsOptimizerOnOverflow) {
  const auto params = make_params();
  torch::optim::SGD optimizer(params, torch::optim::SGDOptions(0.1));
  GradScaler scaler = started_scaler();
  set_grads(params, 1);
  params.back().mutable_grad().view(-1)[-1] = kInf;
  const auto before = copies(params);
  EXPECT_FALSE(scaler.step(optimizer).defined());
  scaler.update();
  expect_equal(params, before);
  EXPECT_EQ(scaler.get_scale(), 8.0);
}

TEST(GradScaler, StepsFusedAdamWithoutTouchingGradients) {
  for (const bool explicit_unscale : {false, true}) {
    const auto params = make_params();
    const auto reference = copy_of(params);
    FusedAdam ours(params, FusedAdamOptions(1e-2));
    FusedAdam plain(reference, FusedAdamOptions(1e-2));
    GradScaler scaler = started_scaler();
    for (std::uint64_t step = 0; step < 3; ++step) {
      set_grads(params, step);
      set_grads(reference, step);
      multiply_grads(params, 16.0);
      if (explicit_unscale) scaler.unscale_(ours);
      const auto grads = grads_of(params);
      scaler.step(ours);
      scaler.update();
      plain.step();
      expect_equal(grads_of(params), grads);
      EXPECT_EQ(ours.last_step_skipped().item<float>(), 0.0F);
    }
    expect_equal(params, reference);
    expect_equal(states_of(ours), states_of(plain));
  }
}

TEST(GradScaler, SkippedFusedAdamKeepsEveryBit) {
  for (const float value : {kInf, -kInf, std::nanf("")}) {
    for (const std::size_t tensor : {0, 1, 4}) {
      for (const std::int64_t element : {0, -1}) {
        const auto params = make_params();
        FusedAdam optimizer(params, FusedAdamOptions(1e-2));
        GradScaler scaler = started_scaler();
        set_grads(params, 1);
        scaler.step(optimizer);
        scaler.update();
        set_grads(params, 2);
        params[tensor].mutable_grad().view(-1)[element] = value;
        const auto before = copies(params);
        const auto states = states_of(optimizer);
        scaler.step(optimizer);
        EXPECT_EQ(optimizer.last_step_skipped().item<float>(), 1.0F);
        scaler.update();
        expect_equal(params, before);
        expect_equal(states_of(optimizer), states);
        EXPECT_EQ(scaler.get_scale(), 8.0);
      }
    }
  }
}

TEST(GradScaler, GrowsAndBacksOffAsTorch) {
  const auto params = make_params();
  FusedAdam optimizer(params);
  GradScaler scaler(torch::kCPU, GradScalerOptions().init_scale(16.0).growth_interval(2));
  std::vector<double> history;
  std::vector<std::int64_t> trackers;
  for (const bool overflow : {false, false, false, true, false, false}) {
    scaler.scale(torch::zeros({}));
    set_grads(params, 1);
    if (overflow) params[0].mutable_grad().view(-1)[0] = kInf;
    scaler.step(optimizer);
    scaler.update();
    history.push_back(scaler.get_scale());
    trackers.push_back(scaler.get_growth_tracker());
  }
  EXPECT_EQ(history, (std::vector<double>{16, 32, 32, 16, 16, 32}));
  EXPECT_EQ(trackers, (std::vector<std::int64_t>{1, 0, 1, 0, 1, 0}));
}

TEST(GradScaler, AnIntervalBelowTheTrackerWaitsForAnOverflow) {
  const auto params = make_params();
  FusedAdam optimizer(params);
  GradScaler scaler(torch::kCPU, GradScalerOptions().init_scale(8.0).growth_interval(6));
  std::vector<double> history;
  for (int step = 0; step < 10; ++step) {
    if (step == 3) scaler.set_growth_interval(2);
    scaler.scale(torch::zeros({}));
    set_grads(params, 1);
    if (step == 6) params[0].mutable_grad().view(-1)[0] = kInf;
    scaler.step(optimizer);
    scaler.update();
    history.push_back(scaler.get_scale());
  }
  EXPECT_EQ(history, (std::vector<double>{8, 8, 8, 8, 8, 8, 4, 4, 8, 8}));
}

TEST(GradScaler, TheScaleStaysWhereFp32HoldsItsReciprocal) {
  const auto params = make_params();
  torch::optim::SGD optimizer(params, torch::optim::SGDOptions(0.1));
  GradScaler scaler(
      torch::kCPU,
      GradScalerOptions().init_scale(0x1p125).growth_interval(1).backoff_factor(1e-46));
  std::vector<double> history;
  for (const bool overflow : {false, false, true, true, false}) {
    scaler.scale(torch::zeros({}));
    set_grads(params, 1);
    if (overflow) params[0].mutable_grad().view(-1)[0] = kInf;
    scaler.step(optimizer);
    scaler.update();
    history.push_back(scaler.get_scale());
  }
  EXPECT_EQ(history[0], 0x1p126);
  EXPECT_EQ(history[1], 0x1p126);
  EXPECT_EQ(history[3], 0x1p-126);
  EXPECT_EQ(history[4], 0x1p-125);
}

TEST(GradScaler, HysteresisForgivesSingleOverflows) {
  const auto params = make_params();
  FusedAdam optimizer(params);
  GradScaler scaler(torch::kCPU, GradScalerOptions().init_scale(64.0).hysteresis(2));
  std::vector<double> history;
  for (const bool overflow : {true, false, true, true, false}) {
    scaler.scale(torch::zeros({}));
    set_grads(params, 1);
    if (overflow) params[0].mutable_grad().view(-1)[0] = kInf;
    scaler.step(optimizer);
    scaler.update();
    history.push_back(scaler.get_scale());
  }
  EXPECT_EQ(history, (std::vector<double>{64, 64, 64, 32, 32}));
  expect_error([] { GradScaler(torch::kCPU, GradScalerOptions().hysteresis(0)); },
               "GradScaler: expected hysteresis to be a 32-bit count of at least 1, got 0.");
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
