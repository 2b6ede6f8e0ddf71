// SPDX-License-Identifier: BSD-3-Clause
// States of a split optimizer load into the class alone, and into any number of ranks. What ranks
// do differently, or what cannot be split, is refused on all ranks by one sentence.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/torchfuse.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "../optim/optim_testing.h"
#include "parallel_testing.h"
#include "sharded_testing.h"

namespace torchfuse::sharded_testing {
namespace {

using optim::FusedAdam;
using optim::FusedAdamOptions;
using parallel::ProcessGroup;
using parallel::ShardedOptimizer;

using ShardedAdam = ShardedOptimizer<FusedAdam>;
using namespace testing;  // NOLINT(google-build-using-namespace): all helpers

/// The parameters and the state dict of the class after two steps, and the parameters after four.
struct TrainedAlone {
  explicit TrainedAlone(const FusedAdamOptions& options) {
    const auto params = sharded_params();
    FusedAdam optimizer(params, options);
    train_sharded(optimizer, params, 0, 2);
    halfway = copy_of(params);
    archive = saved(optimizer);
    state = optimizer.state_dict();
    for (const auto& entry : state.at("state").toGenericDict()) {
      auto tensors = entry.value().toGenericDict();
      // In another order in memory than the parameters, as a file may hold them.
      for (const auto& value : tensors) {
        value.setValue(value.value().toTensor().clone(at::MemoryFormat::Contiguous));
      }
    }
    train_sharded(optimizer, params, 2, 4);
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
      const auto params = copy_of(trained.halfway);
      // The options come from the state, those that say which states there are as well.
      ShardedAdam optimizer(params, FusedAdamOptions(0.5), group);
      optimizer.load_state_dict(trained.state);
      train_sharded(optimizer, params, 2, 4);
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
    train_sharded(optimizer, params, 0, 2);
    const auto mine = optimizer.state_dict();
    const std::string written = saved(optimizer);
    const auto exp_avg = mine.at("state").toGenericDict().at(2).toGenericDict().at("exp_avg");
    EXPECT_EQ(exp_avg.toTensor().sizes(), params[2].sizes());
    const auto last = mine.at("state").toGenericDict().at(6).toGenericDict().at("exp_avg");
    EXPECT_EQ(last.toTensor().strides(), params[6].strides());
    // The optimizer's later steps do not reach what was saved.
    train_sharded(optimizer, params, 2, 4);
    if (group.rank() != 1) return;
    state = mine;
    archive = written;
  });
  const auto expect_goes_on = [&](auto& optimizer, const auto& params, bool from_archive) {
    if (from_archive) {
      load(optimizer, archive);
    } else {
      optimizer.load_state_dict(state);
    }
    train_sharded(optimizer, params, 2, 4);
    expect_equal(params, trained.end);
  };
  for (const bool from_archive : {false, true}) {
    const auto params = copy_of(trained.halfway);
    FusedAdam alone(params, FusedAdamOptions(0.5));
    expect_goes_on(alone, params, from_archive);
    run_on_ranks(3, [&](ProcessGroup& group) {
      const auto mine = copy_of(trained.halfway);
      ShardedAdam optimizer(mine, FusedAdamOptions(0.5), group);
      expect_goes_on(optimizer, mine, from_archive);
    });
  }
}

TEST(ShardedState, OneNumberForAParameterIsNotSplit) {
  run_on_ranks(2, [](ProcessGroup& group) {
    const auto params = sharded_params();
    ShardedOptimizer<optim::FusedNovoGrad> optimizer(params, {}, group);
    train_sharded(optimizer, params, 0, 1);
    const auto state = optimizer.state_dict();
    const auto copies = copy_of(params);
    ShardedOptimizer<optim::FusedNovoGrad> other(copies, {}, group);
    other.load_state_dict(state);
    const auto held = state.at("state").toGenericDict().at(2).toGenericDict();
    EXPECT_EQ(held.at("exp_avg_norm").toTensor().dim(), 0);
    train_sharded(optimizer, params, 1, 3);
    train_sharded(other, copies, 1, 3);
    expect_equal(copies, params);
  });
}

TEST(ShardedState, ALateMomentumBufferKeepsItsStart) {
  const auto steps = [](optim::FusedOptimizer& optimizer,
                        const std::vector<torch::Tensor>& params) {
    train_sharded(optimizer, params, 0, 2);
    static_cast<optim::FusedSGDOptions&>(optimizer.param_groups()[0].options()).momentum(0.9);
    train_sharded(optimizer, params, 2, 4);
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
    const auto copies = copy_of(params);
    ShardedOptimizer<optim::FusedSGD> loaded(copies, optim::FusedSGDOptions(0.1), group);
    loaded.load_state_dict(sharded.state_dict());
    train_sharded(sharded, params, 4, 5);
    train_sharded(loaded, copies, 4, 5);
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
    train_sharded(optimizer, params, 0, 2);
    save_checkpoint(path, Checkpoint().optimizer(optimizer).rng().group(group));
    expect_error(
        [&] { save_checkpoint(path, Checkpoint().optimizer(optimizer, "adam")); },
        "save_checkpoint: expected a group of at least 2 processes, because the states of 'adam' "
        "are "
        "sharded over 2, got 1. Call group(group) on the checkpoint, and save on every rank.");
  });
  run_on_ranks(3, [&](ProcessGroup& group) {
    const auto params = copy_of(trained.halfway);
    ShardedAdam optimizer(params, FusedAdamOptions(0.5), group);
    load_checkpoint(path, Checkpoint().optimizer(optimizer).group(group));
    train_sharded(optimizer, params, 2, 4);
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
      train_sharded(optimizer, params, 0, 1);
      return optimizer.state_dict();
    };
    const auto params = with_sizes({5, 3});
    ShardedAdam optimizer(params, {}, group);
    const std::string where = "torchfuse::parallel::ShardedOptimizer::load_state_dict: expected ";
    expect_error([&] { optimizer.load_state_dict(state_of_sizes({3, 5})); },
                 where +
                     "state[0]['exp_avg'] to have the sizes [5, 3] of its parameter, got [3, "
                     "5].");
    expect_error(
        [&] { optimizer.load_state_dict(trained.state); },
        where +
            "the state of 1 parameters, got the state of 7. Construct the optimizer for the "
            "model that was saved.");
    expect_error(
        [&] {
          optimizer.load_state_dict(
              c10::impl::GenericDict(c10::AnyType::get(), c10::AnyType::get()));
        },
        "FusedAdam: expected the archive to hold state");
    // A state that only one rank has, as after a load on that rank alone.
    if (group.rank() == 1) optimizer.load_state_dict(state_of_sizes({5, 3}));
    expect_error(
        [&] { optimizer.state_dict(); },
        "torchfuse::parallel::ShardedOptimizer: expected the states to be the same on all "
        "ranks, got nothing more on rank 0 and state exp_avg Float of parameter 0 on rank 1. "
        "Use the same model, options and calls in every process.");
  });
}

using Params = std::vector<torch::Tensor>;

const std::string kAgree =
    kWho +
    ": expected the parameters, their gradients and the options to be the same on all ranks, got ";

Params ones(const std::vector<std::vector<std::int64_t>>& sizes = {{5, 3}, {4}}) {
  Params params;
  for (const auto& each : sizes) params.push_back(torch::ones(each, torch::requires_grad()));
  return params;
}

Params with_grads(Params params) {
  for (const auto& param : params) param.mutable_grad() = torch::ones_like(param.detach());
  return params;
}

TEST(ShardedErrors, ParametersThatDifferBetweenRanks) {
  expect_refusal(
      kAgree +
          "parameter 1 Float [4] of strides [1], without a gradient on rank 0 and "
          "parameter 1 Float [5] of strides [1], without a gradient on rank 1. "
          "Use the same model, options and calls in every process.",
      [](ProcessGroup& group) { ShardedAdam(ones({{5, 3}, {4 + group.rank()}}), {}, group); });
  expect_refusal(kAgree + "a group of 1 parameters with lr=0.001, betas=(0.9, 0.999), eps=1e-08, ",
                 [](ProcessGroup& group) {
                   ShardedAdam(Params(group.rank() + 1, torch::ones({3})), {}, group);
                 });
}

TEST(ShardedErrors, OptionsThatDifferBetweenRanks) {
  expect_refusal(kAgree + "a group of 2 parameters with lr=0.1, ", [](ProcessGroup& group) {
    ShardedAdam(ones(), FusedAdamOptions(0.1 * (1.0 + group.rank())), group);
  });
  expect_refusal(kAgree + "a group of 2 parameters with lr=0.2, ", [](ProcessGroup& group) {
    ShardedAdam optimizer(with_grads(ones()), FusedAdamOptions(0.1), group);
    optimizer.step();
    optimizer.param_groups()[0].options().set_lr(0.2 + group.rank());
    optimizer.step();
  });
  expect_refusal(kAgree + "defaults with lr=0.1, ", [](ProcessGroup& group) {
    ShardedAdam optimizer(with_grads(ones()), FusedAdamOptions(0.1), group);
    static_cast<FusedAdamOptions&>(optimizer.defaults()).skip_non_finite(group.rank() == 1);
    optimizer.step();
  });
}

TEST(ShardedErrors, GradientsThatDifferBetweenRanks) {
  const std::string one = "parameter 1 Float [4] of strides [1], with a Strided gradient Float";
  expect_refusal(kAgree + one + " on rank 0 and parameter 1 Float [4] of strides [1], without a " +
                     "gradient on rank 1. Use the same model, options and calls in every process.",
                 [](ProcessGroup& group) {
                   const auto params = with_grads(ones());
                   ShardedAdam optimizer(params, {}, group);
                   optimizer.step();
                   if (group.rank() == 1) params[1].mutable_grad().reset();
                   optimizer.step();
                 });
  expect_refusal(kAgree + "parameter 0 Float [5, 3]", [](ProcessGroup& group) {
    const auto params = ones();
    ShardedAdam optimizer(params, {}, group);
    if (group.rank() == 0) with_grads(params);
    optimizer.step();
  });
  expect_refusal(kWho +
                     "::step: expected the gradient of parameter 0 to be dense, got layout "
                     "Sparse. Use layers with dense gradients.",
                 [](ProcessGroup& group) {
                   const auto params = ones();
                   ShardedAdam optimizer(params, {}, group);
                   params[0].mutable_grad() = torch::ones({5, 3}).to_sparse();
                   optimizer.step();
                 });
}

TEST(ShardedErrors, ParametersThatHaveLeftTheirMemory) {
  const auto move_on = [](std::int64_t first) {
    return [first](ProcessGroup& group) {
      const auto params = with_grads(ones());
      ShardedAdam optimizer(params, {}, group);
      if (group.rank() >= first) params[1].set_data(params[1].detach().clone());
      optimizer.step();
    };
  };
  expect_refusal(
      kWho +
          "::step: expected parameter 1 to stay in the memory that the optimizer "
          "gave it, got another address. Move, convert and load models before constructing "
          "the optimizer, and write values in place: param.copy_(value).",
      move_on(0));
  expect_refusal(kAgree +
                     "parameter 1 Float [4] of strides [1], with a Strided gradient Float on "
                     "rank 0 and parameter 1 Float [4] of strides [1], in other memory, ",
                 move_on(1));
}

TEST(ShardedErrors, WhatCannotBeSplit) {
  const auto refused = [](const std::string& sentence, const Params& params,
                          const FusedAdamOptions& options = {}) {
    expect_refusal(kWho + ": expected " + sentence,
                   [&](ProcessGroup& group) { ShardedAdam(params, options, group); });
  };
  refused(
      "param_groups[0].params[0] to be without gaps or overlap in memory, got sizes [4, 3] with "
      "strides [6, 1]. Use param.contiguous().",
      {torch::ones({4, 6}).narrow(1, 0, 3)});
  refused(
      "param_groups[0].params[0] to be a dense tensor of Float, Half, BFloat16 or Double, got "
      "layout Strided and dtype Long.",
      {torch::ones({3}, torch::kLong)});
  refused("param_groups[0].params[1] to be in the parameter groups once, got a duplicate.",
          Params(2, torch::ones({3})));
  refused(
      "write_back_grads to be kNothing, got another value. Each rank would store gradients "
      "for its shards only.",
      ones(), FusedAdamOptions().write_back_grads(true));
}

TEST(ShardedErrors, ParametersThatAreAdded) {
  const std::string sentence = kWho +
                               "::add_param_group: all parameters must be given at construction. "
                               "Construct a new optimizer with all parameters, and load this "
                               "optimizer's state.";
  expect_refusal(sentence, [](ProcessGroup& group) {
    ShardedAdam(ones(), {}, group).add_param_group({ones({{2}})});
  });
  // torch's base class knows nothing of it.
  expect_refusal(
      kWho +
          "::step: expected param_groups() to hold the 2 shards from construction, got 3 "
          "parameters or different ones.",
      [](ProcessGroup& group) {
        ShardedAdam optimizer(with_grads(ones()), {}, group);
        optimizer.param_groups()[0].params().push_back(torch::ones({2}));
        optimizer.step();
      });
}

TEST(ShardedErrors, GradientsThatTheBaseClassResets) {
  for (const bool set_to_none : {false, true}) {
    run_on_ranks(2, [&](ProcessGroup& group) {
      const auto params = with_grads(ones());
      ShardedAdam optimizer(params, {}, group);
      optimizer.step();
      static_cast<torch::optim::Optimizer&>(optimizer).zero_grad(set_to_none);
      expect_error(
          [&] { optimizer.step(); },
          kWho +
              "::step: zero_grad() was called through a base class, which does not reset the "
              "model's gradients. Call zero_grad() of the ShardedOptimizer or of the model.");
      optimizer.zero_grad();
      with_grads(params);
      optimizer.step();
    });
  }
}

TEST(ShardedErrors, NothingIsLostByWhatIsRefused) {
  run_on_ranks(2, [](ProcessGroup& group) {
    const auto params = with_grads(ones());
    const auto others = with_grads(ones());
    ShardedAdam optimizer(params, {}, group);
    FusedAdam undisturbed(others);
    optimizer.step();
    if (group.rank() == 1) params[0].mutable_grad().reset();
    expect_error([&] { optimizer.step(); }, kAgree);
    with_grads(params);
    optimizer.param_groups()[0].options().set_lr(1e-3);
    static_cast<FusedAdamOptions&>(optimizer.param_groups()[0].options()).eps(-1.0);
    expect_error([&] { optimizer.step(); }, "FusedAdam: expected param_groups[0].eps");
    static_cast<FusedAdamOptions&>(optimizer.param_groups()[0].options()).eps(1e-8);
    optimizer.step();
    undisturbed.step();
    undisturbed.step();
    expect_equal(params, others);
  });
}

class ShardedTwin : public DataParallelTest {};

TEST_F(ShardedTwin, GroupsThatAreNoneOrHaveNoName) {
  expect_error([] { ShardedAdam(ones(), {}, c10::intrusive_ptr<c10d::ProcessGroup>()); },
               kWho + ": expected group to be a process group, got none.");
  expect_error([&] { ShardedAdam(ones(), {}, group_); },
               kWho + ": expected group to name a process group that exists, got 'twins'.");
}

}  // namespace
}  // namespace torchfuse::sharded_testing
