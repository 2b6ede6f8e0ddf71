// SPDX-License-Identifier: BSD-3-Clause
// A scale on another device than the gradients, as with parameters that are offloaded to the host:
// what the host reads has arrived.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/amp/grad_scaler.h>
#include <torchfuse/optim/fused_adam.h>

#include <cstdint>
#include <vector>

#include "../late_device.h"
#include "../optim/optim_testing.h"
#include "amp_testing.h"

namespace torchfuse::testing {
namespace {

using optim::FusedAdam;
using optim::FusedAdamOptions;

/// A scaler whose scale, 16, is on the late device.
amp::GradScaler late_scaler() {
  amp::GradScaler scaler = make_scaler(16.0);
  scaler.scale(late_scalar(1.0));
  return scaler;
}

/// Gradients of parameters on the host, scaled by 16, with an overflow on request.
void set_scaled_grads(const std::vector<torch::Tensor>& params, bool overflow) {
  const torch::NoGradGuard no_grad;
  set_grads(params, 1);
  for (const torch::Tensor& param : params) param.mutable_grad().mul_(16.0);
  if (overflow) params[0].mutable_grad()[0][0] = kInf;
}

TEST(GradScalerDevices, ScalesOutputsOfTheHost) {
  EXPECT_EQ(late_scaler().scale(torch::ones({})).item<float>(), 16.0F);
}

TEST(GradScalerDevices, UnscalesGradientsOfTheHost) {
  const auto params = make_params();
  const auto reference = copy_of(params);
  torch::optim::SGD optimizer(params, torch::optim::SGDOptions(0.1));
  torch::optim::SGD plain(reference, torch::optim::SGDOptions(0.1));
  set_scaled_grads(params, /*overflow=*/false);
  set_grads(reference, 1);
  amp::GradScaler scaler = late_scaler();
  scaler.step(optimizer);
  plain.step();
  expect_equal(params, reference);
}

TEST(GradScalerDevices, TheFusedStepUnscalesGradientsOfTheHost) {
  for (const bool explicit_unscale : {false, true}) {
    const auto params = make_params();
    const auto reference = copy_of(params);
    FusedAdam optimizer(params, FusedAdamOptions(0.1));
    FusedAdam plain(reference, FusedAdamOptions(0.1));
    set_scaled_grads(params, /*overflow=*/false);
    set_grads(reference, 1);
    amp::GradScaler scaler = late_scaler();
    if (explicit_unscale) scaler.unscale_(optimizer);
    scaler.step(optimizer);
    plain.step();
    expect_equal(params, reference);
  }
}

TEST(GradScalerDevices, AnOverflowOnTheHostSkipsTheFusedStep) {
  for (const bool explicit_unscale : {false, true}) {
    const auto params = make_params();
    const auto before = copies(params);
    FusedAdam optimizer(params, FusedAdamOptions(0.1));
    set_scaled_grads(params, /*overflow=*/true);
    amp::GradScaler scaler = late_scaler();
    if (explicit_unscale) scaler.unscale_(optimizer);
    scaler.step(optimizer);
    expect_equal(params, before);
  }
}

TEST(GradScalerDevices, NothingIsCopiedToWhereTheScaleIsMade) {
  amp::ScalerExtras extras;
  extras.hysteresis = 2;
  extras.history_size = 3;
  amp::GradScalerCore core(extras);
  core.set_counts({5, 2, 1});
  const std::int64_t before = copies_from_host();
  core.initialize(late_device(), 16.0, 0);
  core.set_hysteresis_tracker(1);
  EXPECT_EQ(core.counts(), (std::vector<std::int64_t>{5, 2, 1}));
  core.set_counts({7, 3, 0});
  EXPECT_EQ(copies_from_host(), before);
  EXPECT_EQ(core.counts(), (std::vector<std::int64_t>{7, 3, 0}));
  EXPECT_EQ(core.hysteresis_tracker(), 1);
}

TEST(GradScalerDevices, CountsAndHistoryMoveWithTheScale) {
  amp::ScalerExtras extras;
  extras.hysteresis = 3;
  extras.history_size = 4;
  amp::GradScalerCore core(extras);
  core.initialize(torch::kCPU, 16.0, 0);
  core.update({torch::ones({})}, amp::ScaleRule());
  core.set_scale(late_scalar(8.0));
  core.inv_scale();
  EXPECT_EQ(core.step_counts().device(), late_device());
  EXPECT_EQ(core.counts(), (std::vector<std::int64_t>{1, 1, 1}));
  EXPECT_EQ(core.hysteresis_tracker(), 2);
  const auto history = core.scale_history();
  ASSERT_EQ(history.size(), 1U);
  EXPECT_EQ(history[0].scale, 16.0);
  EXPECT_TRUE(history[0].skipped);
}

TEST(GradScalerDevices, FlagsOfALateDeviceAreCombinedOnTheHost) {
  amp::GradScalerCore core;
  core.initialize(torch::kCPU, 16.0, 0);
  EXPECT_EQ(core.combine({late_scalar(1.0)}).item<float>(), 1.0F);
  EXPECT_EQ(core.combine({torch::zeros({}), late_scalar(1.0)}).item<float>(), 1.0F);
}

}  // namespace
}  // namespace torchfuse::testing
