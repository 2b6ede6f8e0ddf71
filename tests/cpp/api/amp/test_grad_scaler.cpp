// SPDX-License-Identifier: BSD-3-Clause
// The scaler's steps and scales, and whole training programs under it against the same programs
// without scaling. Scales are powers of two, so that scaling is exact.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/amp/grad_scaler.h>
#include <torchfuse/optim/fused_adam.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "../optim/optim_testing.h"
#include "amp_testing.h"

namespace torchfuse::testing {
namespace {

using amp::GradScaler;
using amp::GradScalerOptions;
using optim::FusedAdam;
using optim::FusedAdamOptions;

std::vector<torch::Tensor> grads_of(const std::vector<torch::Tensor>& params) {
  std::vector<torch::Tensor> grads;
  for (const torch::Tensor& param : params) grads.push_back(param.grad());
  return copies(grads);
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

TEST(GradScaler, StepsFusedAdamWithoutTouchingGradients) {
  for (const bool explicit_unscale : {false, true}) {
    const auto params = make_params();
    FusedAdam optimizer(params, FusedAdamOptions(1e-2));
    GradScaler scaler = started_scaler();
    set_grads(params, 1);
    if (explicit_unscale) scaler.unscale_(optimizer);
    const auto grads = grads_of(params);
    scaler.step(optimizer);
    expect_equal(grads_of(params), grads);
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
      {Options().init_scale(8.0).growth_interval(1).dynamic(false),
       {false, true, false},
       {8, 8, 8}},
      // It stays where fp32 holds its reciprocal.
      {Options().init_scale(0x1p125).growth_interval(1), {false, false}, {0x1p126, 0x1p126}},
      {Options().init_scale(0x1p-100).growth_interval(1).backoff_factor(1e-46),
       {true, true, false},
       {0x1p-126, 0x1p-126, 0x1p-125}},
  };
  for (std::size_t index = 0; index < cases.size(); ++index) {
    const auto params = make_params();
    torch::optim::SGD optimizer(params, torch::optim::SGDOptions(0.1));
    GradScaler scaler(torch::kCPU, cases[index].options);
    std::vector<double> scales;
    for (const bool overflow : cases[index].overflows) {
      scaler.scale(torch::zeros({}));
      set_grads(params, 1);
      if (overflow) params[0].mutable_grad().view(-1)[0] = kInf;
      scaler.step(optimizer);
      scaler.update();
      scales.push_back(scaler.get_scale());
    }
    EXPECT_EQ(scales, cases[index].scales) << "case " << index;
  }
}

TEST(GradScaler, AnIntervalBelowTheTrackerWaitsForAnOverflow) {
  const auto params = make_params();
  FusedAdam optimizer(params);
  GradScaler scaler(torch::kCPU, GradScalerOptions().init_scale(8.0).growth_interval(6));
  std::vector<double> history;
  std::vector<std::int64_t> trackers;
  for (int step = 0; step < 10; ++step) {
    if (step == 3) scaler.set_growth_interval(2);
    scaler.scale(torch::zeros({}));
    set_grads(params, 1);
    if (step == 6) params[0].mutable_grad().view(-1)[0] = kInf;
    scaler.step(optimizer);
    scaler.update();
    history.push_back(scaler.get_scale());
    trackers.push_back(scaler.get_growth_tracker());
  }
  EXPECT_EQ(history, (std::vector<double>{8, 8, 8, 8, 8, 8, 4, 4, 8, 8}));
  EXPECT_EQ(trackers, (std::vector<std::int64_t>{1, 2, 3, 4, 5, 6, 0, 1, 0, 1}));
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

/// Two small models that feed each other's loss, each with an optimizer of its own.
struct Pair {
  explicit Pair(bool fused) {
    torch::manual_seed(1);
    first = torch::nn::Linear(4, 3);
    second = torch::nn::Linear(4, 3);
    for (const auto& module : {first, second}) {
      if (fused) {
        optimizers.push_back(
            std::make_unique<FusedAdam>(module->parameters(), FusedAdamOptions(1e-2)));
      } else {
        optimizers.push_back(std::make_unique<torch::optim::SGD>(module->parameters(),
                                                                 torch::optim::SGDOptions(0.1)));
      }
    }
  }

  /// The two outputs for the batch of one step.
  std::pair<torch::Tensor, torch::Tensor> outputs(int step) {
    const torch::Tensor data = torch::linspace(-1, 1, 8).view({2, 4}) * (1.0 + step);
    return {first->forward(data), second->forward(data)};
  }

  std::vector<torch::Tensor> values() const {
    std::vector<torch::Tensor> params = first->parameters();
    for (const torch::Tensor& param : second->parameters()) params.push_back(param);
    return copies(params);
  }

  torch::nn::Linear first{nullptr};
  torch::nn::Linear second{nullptr};
  std::vector<std::unique_ptr<torch::optim::Optimizer>> optimizers;
};

/// Trains a pair with and without a scaler; `backward(pair, step, scale)` sets the gradients, where
/// `scale` multiplies a loss.
template <class Backward>
void expect_same_training(Backward backward) {
  for (const bool fused : {false, true}) {
    Pair scaled(fused);
    Pair plain(fused);
    GradScaler scaler = make_scaler(1024.0);
    const auto scale = [&](const torch::Tensor& loss) { return scaler.scale(loss); };
    const auto keep = [](const torch::Tensor& loss) { return loss; };
    for (int step = 0; step < 3; ++step) {
      for (const auto& optimizer : scaled.optimizers) optimizer->zero_grad();
      for (const auto& optimizer : plain.optimizers) optimizer->zero_grad();
      backward(scaled, step, scale);
      backward(plain, step, keep);
      for (const auto& optimizer : scaled.optimizers) scaler.step(*optimizer);
      scaler.update();
      for (const auto& optimizer : plain.optimizers) optimizer->step();
    }
    const auto reference = Pair(fused).values();
    EXPECT_FALSE(torch::equal(plain.values()[0], reference[0]));
    expect_equal(scaled.values(), plain.values());
  }
}

TEST(GradScalerPrograms, SeveralOptimizersLossesAndPartsOfABatch) {
  expect_same_training([](Pair& pair, int step, const auto& scale) {
    for (int part = 0; part < 3; ++part) {
      const auto [first, second] = pair.outputs(3 * step + part);
      scale((2 * first + 3 * second).square().mean() / 4).backward({}, /*keep_graph=*/true);
      scale((first * second).square().mean() / 4).backward();
    }
  });
}

TEST(GradScalerPrograms, GradientPenalty) {
  expect_same_training([](Pair& pair, int step, const auto& scale) {
    const auto [first, second] = pair.outputs(step);
    const torch::Tensor loss = (first * second).square().mean();
    const auto grads = torch::autograd::grad({scale(loss)}, pair.first->parameters(), {},
                                             /*retain_graph=*/true, /*create_graph=*/true);
    // The penalty is on the true gradients: they are divided by the scale first.
    const torch::Tensor inverse = 1.0 / scale(torch::ones({}));
    torch::Tensor penalty = torch::zeros({});
    for (const torch::Tensor& grad : grads) penalty = penalty + (grad * inverse).square().sum();
    scale(loss + penalty).backward();
  });
}

TEST(GradScalerPrograms, ClippingBetweenUnscaleAndStep) {
  for (const bool fused : {false, true}) {
    Pair scaled(fused);
    Pair plain(fused);
    GradScaler scaler = make_scaler(1024.0);
    const auto [first, second] = scaled.outputs(1);
    scaler.scale((first * second).square().mean()).backward();
    const auto [plain_first, plain_second] = plain.outputs(1);
    (plain_first * plain_second).square().mean().backward();
    for (Pair* pair : {&scaled, &plain}) {
      auto params = pair->first->parameters();
      for (const torch::Tensor& param : pair->second->parameters()) params.push_back(param);
      if (pair == &scaled) {
        for (const auto& optimizer : pair->optimizers) scaler.unscale_(*optimizer);
      }
      EXPECT_GT(torch::nn::utils::clip_grad_norm_(params, 0.01), 0.01);
    }
    for (const auto& optimizer : scaled.optimizers) scaler.step(*optimizer);
    scaler.update();
    for (const auto& optimizer : plain.optimizers) optimizer->step();
    expect_equal(scaled.values(), plain.values());
  }
}

}  // namespace
}  // namespace torchfuse::testing
