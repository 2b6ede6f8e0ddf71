// SPDX-License-Identifier: BSD-3-Clause
// Ranks that step other parameters of one model clip and skip as one process that has them all.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/parallel/sharded_optimizer.h>
#include <torchfuse/torchfuse.h>

#include <cmath>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../optim/optim_testing.h"
#include "sharded_testing.h"

namespace torchfuse::sharded_testing {
namespace {

using optim::FusedAdam;
using optim::FusedAdamOptions;
using parallel::ProcessGroup;
using testing::expect_close;
using testing::expect_error;

constexpr std::size_t kFirstOfSecondStage = 2;

/// What a stage keeps of what the whole model has; none: all of it.
std::vector<torch::Tensor> of_stage(std::vector<torch::Tensor> all,
                                    std::optional<std::int64_t> rank) {
  if (rank == 0) all.resize(kFirstOfSecondStage);
  if (rank == 1) all.erase(all.begin(), all.begin() + kFirstOfSecondStage);
  return all;
}

struct Trained {
  std::vector<torch::Tensor> params;
  std::vector<double> norms;
  std::vector<double> skipped;
  std::vector<double> scales;
};

/// In the second step a gradient of the second stage is infinite.
Trained train(std::optional<std::int64_t> rank, const std::string& group, bool unscales,
              bool frozen = false) {
  const auto all = sharded_params();
  Trained found;
  found.params = of_stage(all, rank);
  FusedAdam optimizer(found.params, FusedAdamOptions(0.1).max_grad_norm(0.5));
  if (rank.has_value()) optimizer.set_norm_groups({group});
  amp::GradScaler scaler(torch::kCPU, amp::GradScalerOptions().init_scale(64.0));
  scaler.scale(torch::zeros({}));
  for (int step = 0; step < 3; ++step) {
    set_waves_as_grads(all, step, scaler.get_scale());
    if (step == 1) all.back().mutable_grad()[-1][-1][-1][-1] = INFINITY;
    for (std::size_t i = 0; frozen && i < kFirstOfSecondStage; ++i) all[i].mutable_grad().reset();
    if (unscales) scaler.unscale_(optimizer);
    scaler.step(optimizer);
    scaler.update();
    found.norms.push_back(optimizer.grad_norm().item<double>());
    found.skipped.push_back(optimizer.last_step_skipped().item<double>());
    found.scales.push_back(scaler.get_scale());
  }
  return found;
}

void expect_as_one(const Trained& found, const Trained& whole, std::int64_t rank) {
  const auto expected = of_stage(whole.params, rank);
  ASSERT_EQ(found.params.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    expect_close(found.params[i].detach(), expected[i].detach());
  }
  EXPECT_EQ(found.skipped, (std::vector<double>{0.0, 1.0, 0.0}));
  EXPECT_EQ(found.scales, whole.scales);
  for (const std::size_t step : {0, 2}) {
    EXPECT_NEAR(found.norms[step], whole.norms[step], 1e-5 * whole.norms[step]);
  }
  EXPECT_EQ(found.norms[1], INFINITY);
}

/// Also where the first stage has no gradients.
TEST(NormGroups, StagesTrainAsOneProcessThatHasAllParameters) {
  for (const bool unscales : {false, true}) {
    for (const bool frozen : {false, true}) {
      const Trained whole = train(std::nullopt, "", unscales, frozen);
      run_on_ranks(2, [&](ProcessGroup& group) {
        expect_as_one(train(group.rank(), group.name(), unscales, frozen), whole, group.rank());
      });
    }
  }
}

TEST(NormGroups, OneScalerForTwoOptimizersAndAFrozenStageThatOnlyObeys) {
  run_on_ranks(2, [](ProcessGroup& group) {
    const torch::Tensor shared = torch::ones({3}, torch::requires_grad());
    const torch::Tensor alone = torch::ones({3}, torch::requires_grad());
    FusedAdam optimizer({shared}, FusedAdamOptions(0.5));
    optimizer.set_norm_groups({group.name()});
    torch::optim::SGD other({alone}, 0.5);
    amp::GradScaler scaler(torch::kCPU, amp::GradScalerOptions().init_scale(64.0));
    scaler.scale(torch::zeros({}));
    for (int step = 0; step < 2; ++step) {
      if (group.rank() == 1) {
        shared.mutable_grad() = torch::full({3}, step == 0 ? INFINITY : 32.0);
      }
      alone.mutable_grad() = torch::full({3}, 64.0);
      scaler.unscale_(optimizer);
      scaler.unscale_(other);
      scaler.step(optimizer);
      scaler.step(other);
      scaler.update();
      EXPECT_EQ(optimizer.last_step_skipped().item<double>(), step == 0 ? 1.0 : 0.0);
      EXPECT_EQ(scaler.get_scale(), 32.0);
    }
    expect_close(shared.detach(), torch::full({3}, group.rank() == 1 ? 0.5 : 1.0));
    expect_close(alone.detach(), torch::full({3}, -0.5));
  });
}

TEST(NormGroups, SplitStatesWithinStages) {
  const Trained whole = train(std::nullopt, "", false);
  run_on_ranks(4, [&](ProcessGroup& world) {
    auto first = world.new_group({0, 1});
    auto second = world.new_group({2, 3});
    auto left = world.new_group({0, 2});
    auto right = world.new_group({1, 3});
    const std::int64_t stage = world.rank() / 2;
    ProcessGroup& replicas = stage == 0 ? *first : *second;
    ProcessGroup& stages = world.rank() % 2 == 0 ? *left : *right;
    const auto all = sharded_params();
    const auto params = of_stage(all, stage);
    parallel::ShardedOptimizer<FusedAdam> optimizer(
        params, FusedAdamOptions(0.1).max_grad_norm(0.5), replicas);
    optimizer.set_norm_groups({stages.name()});
    for (const int step : {0, 2}) {
      set_waves_as_grads(all, step);
      optimizer.step();
      EXPECT_NEAR(optimizer.grad_norm().item<double>(), whole.norms[step],
                  1e-5 * whole.norms[step]);
    }
    const auto expected = of_stage(whole.params, stage);
    for (std::size_t i = 0; i < params.size(); ++i) {
      expect_close(params[i].detach(), expected[i].detach());
    }
  });
}

TEST(NormGroups, AreGroupsOfThisProcessAndGivenOnce) {
  FusedAdam optimizer(sharded_params());
  expect_error([&] { optimizer.set_norm_groups({"nowhere"}); },
               "FusedAdam::set_norm_groups: expected group to name a process group that exists, "
               "got 'nowhere'.");
  run_on_ranks(2, [](ProcessGroup& group) {
    FusedAdam of_rank(sharded_params());
    expect_error([&] { of_rank.set_norm_groups({group.name(), group.name()}); },
                 "FusedAdam::set_norm_groups: expected each group once, got '" + group.name() +
                     "' a second time");
    parallel::ShardedOptimizer<FusedAdam> split(sharded_params(), {}, group);
    expect_error([&] { split.set_norm_groups({group.name()}); },
                 "FusedAdam::set_norm_groups: expected groups whose ranks step other parameters, "
                 "got '" +
                     group.name() + "'");
  });
}

}  // namespace
}  // namespace torchfuse::sharded_testing
