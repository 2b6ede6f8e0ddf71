// SPDX-License-Identifier: BSD-3-Clause
// What ranks do differently, or what cannot be split, is refused on all ranks by one sentence.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/optim/fused_adam.h>
#include <torchfuse/parallel/sharded_optimizer.h>

#include <functional>
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
using Params = std::vector<torch::Tensor>;
using testing::DataParallelTest;
using testing::error_of;
using testing::expect_equal;
using testing::expect_error;

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
          "parameter 1 Float [5] of strides [1], without a gradient on rank 1. Let "
          "every process do the same.",
      [](ProcessGroup& group) { ShardedAdam(ones({{5, 3}, {4 + group.rank()}}), {}, group); });
  expect_refusal(kAgree + "a group of 1 parameters with lr=0.001, betas=(0.9, 0.999), eps=1e-08, ",
                 [](ProcessGroup& group) {
                   ShardedAdam(Params(group.rank() + 1, torch::ones({3})), {}, group);
                 });
  expect_refusal(kAgree +
                     "parameter 0 Float [3] of strides [1], without a gradient on rank 0 and "
                     "parameter 0 Half [3]",
                 [](ProcessGroup& group) {
                   const auto dtype = group.rank() == 0 ? torch::kFloat : torch::kHalf;
                   ShardedAdam(Params{torch::ones({3}, dtype)}, {}, group);
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
                     "gradient on rank 1. Let every process do the same.",
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
  expect_refusal(kWho +
                     "::step: expected parameter 1 to stay in the memory that the optimizer "
                     "gave it, got another address. Move, convert and load models before the "
                     "optimizer is made, and write values in place: param.copy_(value).",
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
  refused("param_groups[0].params[1] to be in the parameter groups once, got it a second time.",
          Params(2, torch::ones({3})));
  refused(
      "write_back_grads to be kNothing, got another value. Each rank would store its own part "
      "only.",
      ones(), FusedAdamOptions().write_back_grads(true));
}

TEST(ShardedErrors, ParametersThatAreAdded) {
  const std::string sentence = kWho +
                               "::add_param_group: expected all parameters at construction, got "
                               "more. Make a new optimizer with all of them, and load the state of "
                               "this one.";
  expect_refusal(sentence, [](ProcessGroup& group) {
    ShardedAdam(ones(), {}, group).add_param_group({ones({{2}})});
  });
  // torch's base class knows nothing of it.
  expect_refusal(kWho + "::step: expected the parameters of the construction, 2, got 3, or others.",
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
      expect_error([&] { optimizer.step(); },
                   kWho +
                       "::step: expected zero_grad() of the ShardedOptimizer or of the model, "
                       "got that of a base class, which leaves the model's gradients. Call the "
                       "one of the class itself.");
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

TEST(ShardedErrors, Groups) {
  EXPECT_ERROR([] { ShardedAdam(ones(), {}, c10::intrusive_ptr<c10d::ProcessGroup>()); },
               kWho + ": expected group to be a process group, got none.");
}

class ShardedTwin : public DataParallelTest {};

TEST_F(ShardedTwin, AGroupThatHasNoName) {
  EXPECT_ERROR([&] { ShardedAdam(ones(), {}, group_); },
               kWho + ": expected group to name a process group that exists, got 'twins'.");
}

}  // namespace
}  // namespace torchfuse::sharded_testing
