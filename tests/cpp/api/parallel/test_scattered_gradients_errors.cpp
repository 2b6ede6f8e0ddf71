// SPDX-License-Identifier: BSD-3-Clause
// What goes wrong between a backward that reduces gradients to parts and the step that uses them.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/torchfuse.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../optim/optim_testing.h"
#include "parallel_testing.h"
#include "scattered_testing.h"

namespace torchfuse::sharded_testing {
namespace {

using optim::FusedAdam;
using optim::FusedAdamOptions;
using parallel::ProcessGroup;
using parallel::ShardedOptimizer;
using testing::error_of;
using testing::expect_equal;

/// A model and its optimizer.
struct Training {
  explicit Training(ProcessGroup& group,
                    const parallel::DistributedDataParallelOptions& options = small_buckets())
      : rank(group.rank()),
        model(net, group, options),
        optimizer(net->parameters(), FusedAdamOptions(0.01), model) {}

  void backward(int step = 0) { scattered_loss(model, rank, step).backward(); }

  std::int64_t rank;
  ScatteredNet net;
  ScatteredModel model;
  ShardedOptimizer<FusedAdam> optimizer;
};

TEST(ScatteredGradientsErrors, AWholeGradientThatNobodyReduced) {
  expect_refusal(
      kWho +
          "::step: expected parameter 0 to have no gradient of its own, got one: backward() left "
          "it within no_sync(), or the program set it. Run the last backward() before a step "
          "outside of no_sync().",
      [](ProcessGroup& group) {
        Training training(group);
        const auto local = training.model.no_sync();
        training.backward();
        training.optimizer.step();
      });
  expect_refusal(kWho +
                     ": expected the parameters, their gradients and the options to be the same on "
                     "all ranks, got parameter 0 Float [] of strides [], with a Strided gradient "
                     "Float on rank 0 and parameter 0 Float [] of strides [], with a Strided "
                     "gradient Float, with a whole gradient on rank 1. ",
                 [](ProcessGroup& group) {
                   Training training(group);
                   training.backward();
                   if (group.rank() == 1) training.net->gain.mutable_grad() = torch::ones({});
                   training.optimizer.step();
                 });
}

TEST(ScatteredGradientsErrors, ARefusedStepLosesNothing) {
  run_on_ranks(2, [](ProcessGroup& group) {
    Training refused(group);
    Training expected(group);
    refused.backward();
    expected.backward();
    refused.net->gain.mutable_grad() = torch::ones({});
    EXPECT_ERROR([&] { refused.optimizer.step(); }, "to have no gradient of its own");
    refused.net->gain.mutable_grad().reset();
    refused.optimizer.step();
    expected.optimizer.step();
    expect_equal(values_of(*refused.net), values_of(*expected.net));
  });
}

TEST(ScatteredGradientsErrors, ParametersOfTheModelAreThoseOfTheOptimizer) {
  expect_refusal(kWho +
                     ": expected all parameters of the model that require gradients, got none in "
                     "the place of 'last.bias'. Add it to a group, or freeze it before the model "
                     "is made data-parallel.",
                 [](ProcessGroup& group) {
                   ScatteredNet net;
                   ScatteredModel model(net, group);
                   auto params = net->parameters();
                   params.pop_back();
                   ShardedOptimizer<FusedAdam>(params, {}, model);
                 });
  expect_refusal(kWho +
                     ": expected parameters of the model, got another one, of sizes [2, 3], whose "
                     "gradients nobody would reduce. Give it an optimizer of its own.",
                 [](ProcessGroup& group) {
                   ScatteredNet net;
                   ScatteredModel model(net, group);
                   auto params = net->parameters();
                   params.push_back(torch::ones({2, 3}, torch::requires_grad()));
                   ShardedOptimizer<FusedAdam>(params, {}, model);
                 });
}

TEST(ScatteredGradientsErrors, FrozenParametersStayAsTheyAre) {
  run_on_ranks(2, [](ProcessGroup& group) {
    ScatteredNet net;
    net->first->weight.requires_grad_(false);
    ScatteredModel model(net, group, small_buckets());
    ShardedOptimizer<FusedAdam> optimizer(net->parameters(), FusedAdamOptions(0.01), model);
    const torch::Tensor before = net->first->weight.clone();
    const torch::Tensor bias = net->first->bias.detach().clone();
    scattered_loss(model, group.rank(), 0).backward();
    optimizer.step();
    EXPECT_TRUE(torch::equal(net->first->weight, before));
    EXPECT_FALSE(torch::equal(net->first->bias, bias));
  });
}

TEST(ScatteredGradientsErrors, AParameterWithoutAGradientIsNamedAndTrainingGoesOn) {
  run_on_ranks(2, [](ProcessGroup& group) {
    Training training(group);
    Training expected(group);
    const torch::Tensor x = waves({5, 6}, 1.0).to(torch::kFloat);
    const auto miss = [&] {
      (training.model.forward(x).detach().sum() + training.net->gain * 2.0).backward();
    };
    EXPECT_ERROR(miss,
                 "expected backward() to give each parameter a gradient, got none for 6 of 7 "
                 "parameters: 'first.weight', 'first.bias', 'conv.weight', 'conv.bias', "
                 "'last.weight', ... 6 in all. Let the loss depend on all, freeze them, or set "
                 "find_unused_parameters.");
    training.optimizer.zero_grad();
    training.backward();
    expected.backward();
    training.optimizer.step();
    expected.optimizer.step();
    expect_equal(values_of(*training.net), values_of(*expected.net));
  });
}

TEST(ScatteredGradientsErrors, AStepAfterABackwardThatEndedEarly) {
  expect_refusal(
      kWho + "::step: expected the last backward() to reach its end, got one that ended early",
      [](ProcessGroup& group) {
        Training training(group);
        training.backward();
        training.net->first->weight.register_hook([](const torch::Tensor& grad) {
          TORCH_CHECK(false, "ended");
          return grad;
        });
        EXPECT_ERROR([&] { training.backward(1); }, "ended");
        training.optimizer.step();
      });
}

TEST(ScatteredGradientsErrors, AnOptimizerThatIsGone) {
  expect_refusal(
      "torchfuse::parallel::DistributedDataParallel: expected the ShardedOptimizer that this "
      "model's gradients are split for, got one that has been destroyed",
      [](ProcessGroup& group) {
        ScatteredNet net;
        ScatteredModel model(net, group, small_buckets());
        const auto make = [&] {
          return std::make_unique<ShardedOptimizer<FusedAdam>>(net->parameters(),
                                                               FusedAdamOptions(0.01), model);
        };
        auto optimizer = make();
        optimizer.reset();
        optimizer = make();
        scattered_loss(model, group.rank(), 0).backward();
        optimizer->step();
        EXPECT_TRUE(optimizer->last_step_skipped().defined());
        optimizer.reset();
        scattered_loss(model, group.rank(), 1);
      });
}

TEST(ScatteredGradientsErrors, ARankThatDoesNotArriveIsNamed) {
  using namespace std::chrono_literals;
  const auto errors = on_ranks(
      2,
      [](ProcessGroup& group) {
        Training training(group);
        if (group.rank() == 0) training.backward();
      },
      2s);
  EXPECT_EQ(errors[1], "");
  EXPECT_PRED_FORMAT2(::testing::IsSubstring,
                      "torchfuse::parallel::DistributedDataParallel: expected all 2 ranks of group "
                      "'",
                      errors[0]);
  EXPECT_PRED_FORMAT2(::testing::IsSubstring, "in the reduction of gradients 1 of ", errors[0]);
  EXPECT_PRED_FORMAT2(::testing::IsSubstring, "within the group's timeout", errors[0]);
}

}  // namespace
}  // namespace torchfuse::sharded_testing
