// SPDX-License-Identifier: BSD-3-Clause
// Whole training programs under the scaler, against the same programs without scaling. Scales are
// powers of two, so that scaling is exact.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/amp/grad_scaler.h>
#include <torchfuse/optim/fused_adam.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "../optim/optim_testing.h"
#include "amp_testing.h"

namespace torchfuse::testing {
namespace {

using amp::GradScaler;
using optim::FusedAdam;
using optim::FusedAdamOptions;

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

TEST(GradScalerPrograms, SeveralOptimizersWithOneLoss) {
  expect_same_training([](Pair& pair, int step, const auto& scale) {
    const auto [first, second] = pair.outputs(step);
    scale((first * second).square().mean()).backward();
  });
}

TEST(GradScalerPrograms, SeveralLosses) {
  expect_same_training([](Pair& pair, int step, const auto& scale) {
    const auto [first, second] = pair.outputs(step);
    scale((2 * first + 3 * second).square().mean()).backward({}, /*keep_graph=*/true);
    scale((3 * first - 5 * second).square().mean()).backward();
  });
}

TEST(GradScalerPrograms, GradientAccumulation) {
  expect_same_training([](Pair& pair, int step, const auto& scale) {
    for (int part = 0; part < 3; ++part) {
      const auto [first, second] = pair.outputs(3 * step + part);
      scale((first - second).square().mean() / 4).backward();
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
