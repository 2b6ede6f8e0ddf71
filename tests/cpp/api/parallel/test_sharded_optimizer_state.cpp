// SPDX-License-Identifier: BSD-3-Clause
// States of a split optimizer load into the class alone, and into any number of ranks.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/checkpoint.h>
#include <torchfuse/optim/fused_adam.h>
#include <torchfuse/optim/fused_novograd.h>
#include <torchfuse/optim/fused_sgd.h>
#include <torchfuse/parallel/sharded_optimizer.h>

#include <filesystem>
#include <memory>
#include <sstream>
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
using parallel::ShardedOptimizer;
using ShardedAdam = ShardedOptimizer<FusedAdam>;
using testing::expect_equal;
using testing::expect_error;
using testing::load;
using testing::saved;

void step_through(torch::optim::Optimizer& optimizer, const std::vector<torch::Tensor>& params,
                  int begin, int end) {
  for (int step = begin; step < end; ++step) {
    set_waves_as_grads(params, step);
    optimizer.step();
  }
}

/// The parameters and the state dict of the class after two steps, and the parameters after four.
struct TrainedAlone {
  explicit TrainedAlone(const FusedAdamOptions& options) {
    const auto params = sharded_params();
    FusedAdam optimizer(params, options);
    step_through(optimizer, params, 0, 2);
    halfway = clones_of(params);
    archive = saved(optimizer);
    state = optimizer.state_dict();
    for (const auto& entry : state.at("state").toGenericDict()) {
      auto tensors = entry.value().toGenericDict();
      // In another order in memory than the parameters, as a file may hold them.
      for (const auto& value : tensors) {
        value.setValue(value.value().toTensor().clone(at::MemoryFormat::Contiguous));
      }
    }
    step_through(optimizer, params, 2, 4);
    end = params;
  }

  std::vector<torch::Tensor> halfway;
  std::vector<torch::Tensor> end;
  std::string archive;
  c10::impl::GenericDict state = c10::impl::GenericDict(c10::AnyType::get(), c10::AnyType::get());
};

TEST(ShardedState, OfTheClassAloneGoesOnWithAnyNumberOfRanks) {
  const TrainedAlone trained(FusedAdamOptions().amsgrad(true).ema_decay(0.5));
  for (const std::int64_t ranks : {1, 2, 3}) {
    run_on_ranks(ranks, [&](ProcessGroup& group) {
      const auto params = clones_of(trained.halfway);
      // The options come from the state, those that say which states there are as well.
      ShardedAdam optimizer(params, FusedAdamOptions(0.5), group);
      optimizer.load_state_dict(trained.state);
      step_through(optimizer, params, 2, 4);
      expect_equal(params, trained.end);
    });
  }
}

TEST(ShardedState, OfTwoRanksGoesOnInTheClassAloneAndInThree) {
  const auto options = FusedAdamOptions().amsgrad(true).ema_decay(0.5);
  const TrainedAlone trained(options);
  auto state = c10::impl::GenericDict(c10::AnyType::get(), c10::AnyType::get());
  std::string archive;
  run_on_ranks(2, [&](ProcessGroup& group) {
    const auto params = sharded_params();
    ShardedAdam optimizer(params, options, group);
    step_through(optimizer, params, 0, 2);
    const auto mine = optimizer.state_dict();
    const std::string written = saved(optimizer);
    const auto exp_avg = mine.at("state").toGenericDict().at(2).toGenericDict().at("exp_avg");
    EXPECT_EQ(exp_avg.toTensor().sizes(), params[2].sizes());
    const auto last = mine.at("state").toGenericDict().at(6).toGenericDict().at("exp_avg");
    EXPECT_EQ(last.toTensor().strides(), params[6].strides());
    // The optimizer's later steps do not reach what was saved.
    step_through(optimizer, params, 2, 4);
    if (group.rank() != 1) return;
    state = mine;
    archive = written;
  });
  const auto params = clones_of(trained.halfway);
  FusedAdam alone(params, FusedAdamOptions(0.5));
  alone.load_state_dict(state);
  step_through(alone, params, 2, 4);
  expect_equal(params, trained.end);
  run_on_ranks(3, [&](ProcessGroup& group) {
    for (const bool from_archive : {false, true}) {
      const auto mine = clones_of(trained.halfway);
      ShardedAdam optimizer(mine, FusedAdamOptions(0.5), group);
      if (from_archive) {
        load(optimizer, archive);
      } else {
        optimizer.load_state_dict(state);
      }
      step_through(optimizer, mine, 2, 4);
      expect_equal(mine, trained.end);
    }
  });
  const auto again = clones_of(trained.halfway);
  FusedAdam of_archive(again, FusedAdamOptions(0.5));
  load(of_archive, archive);
  step_through(of_archive, again, 2, 4);
  expect_equal(again, trained.end);
}

TEST(ShardedState, OneNumberForAParameterIsNotSplit) {
  run_on_ranks(2, [](ProcessGroup& group) {
    const auto params = sharded_params();
    ShardedOptimizer<optim::FusedNovoGrad> optimizer(params, {}, group);
    step_through(optimizer, params, 0, 1);
    const auto state = optimizer.state_dict();
    const auto copies = clones_of(params);
    ShardedOptimizer<optim::FusedNovoGrad> other(copies, {}, group);
    other.load_state_dict(state);
    const auto held = state.at("state").toGenericDict().at(2).toGenericDict();
    EXPECT_EQ(held.at("exp_avg_norm").toTensor().dim(), 0);
    step_through(optimizer, params, 1, 3);
    step_through(other, copies, 1, 3);
    expect_equal(copies, params);
  });
}

TEST(ShardedState, ALateMomentumBufferKeepsItsStart) {
  const auto steps = [](optim::FusedOptimizer& optimizer,
                        const std::vector<torch::Tensor>& params) {
    step_through(optimizer, params, 0, 2);
    static_cast<optim::FusedSGDOptions&>(optimizer.param_groups()[0].options()).momentum(0.9);
    step_through(optimizer, params, 2, 4);
  };
  const auto alone = sharded_params();
  optim::FusedSGD whole(alone, optim::FusedSGDOptions(0.1));
  steps(whole, alone);
  const auto expected = whole.state_dict().at("state").toGenericDict();
  run_on_ranks(2, [&](ProcessGroup& group) {
    const auto params = sharded_params();
    ShardedOptimizer<optim::FusedSGD> sharded(params, optim::FusedSGDOptions(0.1), group);
    steps(sharded, params);
    const auto found = sharded.state_dict().at("state").toGenericDict();
    for (const auto& entry : expected) {
      const auto one = found.at(entry.key()).toGenericDict();
      const auto other = entry.value().toGenericDict();
      for (const char* key : {"step", "momentum_start", "momentum_buffer"}) {
        EXPECT_TRUE(torch::equal(one.at(key).toTensor(), other.at(key).toTensor()))
            << entry.key() << " " << key;
      }
    }
    const auto copies = clones_of(params);
    ShardedOptimizer<optim::FusedSGD> loaded(copies, optim::FusedSGDOptions(0.1), group);
    loaded.load_state_dict(sharded.state_dict());
    step_through(sharded, params, 4, 5);
    step_through(loaded, copies, 4, 5);
    expect_equal(copies, params);
  });
}

TEST(ShardedState, ACheckpointHoldsTheWholeOptimizer) {
  const auto folder = std::filesystem::path(::testing::TempDir()) / "sharded_checkpoint";
  std::filesystem::create_directories(folder);
  const std::string path = folder / "last.pt";
  const TrainedAlone trained(FusedAdamOptions(0.01));
  run_on_ranks(2, [&](ProcessGroup& group) {
    const auto params = sharded_params();
    ShardedAdam optimizer(params, FusedAdamOptions(0.01), group);
    step_through(optimizer, params, 0, 2);
    save_checkpoint(path, Checkpoint().optimizer(optimizer).rng().group(group));
    expect_error(
        [&] { save_checkpoint(path, Checkpoint().optimizer(optimizer, "adam")); },
        "save_checkpoint: expected a group of at least 2 processes, which share the states "
        "of 'adam', got 1. Call group(group), and save in each of them.");
  });
  const auto alone = clones_of(trained.halfway);
  FusedAdam whole(alone, FusedAdamOptions(0.5));
  load_checkpoint(path, Checkpoint().optimizer(whole));
  step_through(whole, alone, 2, 4);
  expect_equal(alone, trained.end);
  run_on_ranks(3, [&](ProcessGroup& group) {
    const auto params = clones_of(trained.halfway);
    ShardedAdam optimizer(params, FusedAdamOptions(0.5), group);
    load_checkpoint(path, Checkpoint().optimizer(optimizer).group(group));
    step_through(optimizer, params, 2, 4);
    expect_equal(params, trained.end);
  });
  std::filesystem::remove_all(folder);
}

TEST(ShardedState, WhatDoesNotFitIsRefused) {
  const TrainedAlone trained(FusedAdamOptions(0.01));
  run_on_ranks(2, [&](ProcessGroup& group) {
    const auto with_sizes = [](std::vector<std::int64_t> sizes) {
      return std::vector<torch::Tensor>{torch::ones(sizes, torch::requires_grad())};
    };
    const auto state_of_sizes = [&](std::vector<std::int64_t> sizes) {
      const auto params = with_sizes(std::move(sizes));
      FusedAdam optimizer(params, FusedAdamOptions(0.01));
      step_through(optimizer, params, 0, 1);
      return optimizer.state_dict();
    };
    const auto params = with_sizes({5, 3});
    ShardedAdam optimizer(params, {}, group);
    const std::string where = "torchfuse::parallel::ShardedOptimizer::load_state_dict: expected ";
    expect_error([&] { optimizer.load_state_dict(state_of_sizes({3, 5})); },
                 where +
                     "state[0]['exp_avg'] to have the sizes [5, 3] of its parameter, got [3, "
                     "5].");
    expect_error([&] { optimizer.load_state_dict(trained.state); },
                 where +
                     "the state of 1 parameters, got that of 7. Make the optimizer of the "
                     "model that was saved.");
    expect_error(
        [&] {
          optimizer.load_state_dict(
              c10::impl::GenericDict(c10::AnyType::get(), c10::AnyType::get()));
        },
        "FusedAdam: expected the archive to hold state");
    // A state that only one rank has, as after a load on that rank alone.
    if (group.rank() == 1) optimizer.load_state_dict(state_of_sizes({5, 3}));
    expect_error([&] { optimizer.state_dict(); },
                 "torchfuse::parallel::ShardedOptimizer: expected the states to be the same on all "
                 "ranks, got no more on rank 0 and state exp_avg Float of parameter 0 on rank 1. "
                 "Let every process do the same.");
  });
}

}  // namespace
}  // namespace torchfuse::sharded_testing
