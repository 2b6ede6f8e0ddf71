// SPDX-License-Identifier: BSD-3-Clause
// Training in which parameters arrive beside the next forward pass, and modules that cannot wait.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/optim/fused_adam.h>
#include <torchfuse/parallel/distributed_data_parallel.h>
#include <torchfuse/parallel/sharded_optimizer.h>

#include <string>
#include <vector>

#include "../optim/optim_testing.h"
#include "gather_testing.h"
#include "scattered_testing.h"
#include "sharded_testing.h"

namespace torchfuse::sharded_testing {
namespace {

using optim::FusedAdam;
using optim::FusedAdamOptions;
using parallel::GatherModules;
using parallel::ProcessGroup;
using ShardedAdam = parallel::ShardedOptimizer<FusedAdam>;
using testing::expect_equal;

/// The parameters after steps in which two of three layers wait for theirs, or none does.
std::vector<torch::Tensor> trained(ProcessGroup& group, bool scatters, bool in_forward) {
  WaitingNet net;
  WaitingModel model(net, group, small_buckets());
  const auto options = FusedAdamOptions(0.05).max_grad_norm(1.0).ema_decay(0.5);
  const GatherModules units = in_forward ? net->modules({0, 1}) : GatherModules();
  auto optimizer = scatters ? ShardedAdam(net->parameters(), options, model, units)
                            : ShardedAdam(net->parameters(), options, group, units);
  if (in_forward) {
    net->before = [&](const torch::nn::Module& layer) {
      if (&layer != net->layers[2].get()) optimizer.finish_gather(layer);
    };
  }
  for (int step = 0; step < kShardedSteps; ++step) {
    optimizer.zero_grad();
    const auto shift = 10.0 * (step + 1) + static_cast<double>(group.rank());
    model.forward(waves({5, 8}, shift).to(torch::kFloat)).square().mean().backward();
    optimizer.step();
    if (step == 1) {
      const optim::EmaWeights averages(optimizer);
      model.forward(waves({5, 8}, shift).to(torch::kFloat));
    }
  }
  optimizer.finish_gather();
  return values_of(*net);
}

TEST(GatherInForward, ParametersAreThoseOfGathersInTheStep) {
  for (const bool scatters : {false, true}) {
    for (const std::int64_t ranks : {1, 2, 3}) {
      SCOPED_TRACE(c10::str("stage ", scatters ? 2 : 1, " on ", ranks, " ranks"));
      run_on_ranks(ranks, [&](ProcessGroup& group) {
        expect_equal(trained(group, scatters, true), trained(group, scatters, false));
      });
    }
  }
}

TEST(GatherInForward, ModulesThatDifferBetweenRanksAreRefused) {
  expect_refusal(kWho +
                     ": expected the parameters, their gradients and the options to be the same on "
                     "all ranks, got gather_in_forward over parameters [0, 1] on rank 0 and "
                     "gather_in_forward over parameters [2, 3] on rank 1. Let every process do the "
                     "same.",
                 [](ProcessGroup& group) {
                   WaitingNet net;
                   const auto own = static_cast<std::size_t>(group.rank());
                   ShardedAdam(net->parameters(), {}, group, net->modules({own}));
                 });
}

TEST(GatherInForward, ModulesThatCannotWaitAreRefusedOnAllRanks) {
  const auto refused = [](const GatherModules& modules) {
    return [modules](ProcessGroup& group) {
      WaitingNet net;
      const void* before = net->layers[0]->weight.const_data_ptr();
      GatherModules units = net->modules({0});
      units.insert(units.end(), modules.begin(), modules.end());
      try {
        ShardedAdam(net->parameters(), {}, group, units);
      } catch (...) {
        EXPECT_EQ(net->layers[0]->weight.const_data_ptr(), before);
        throw;
      }
    };
  };
  expect_refusal(kWho + ": expected gather_in_forward[1] to be a module, got none.",
                 refused({nullptr}));
  expect_refusal(kWho +
                     ": expected gather_in_forward[1] to have parameters of the optimizer, got a "
                     "torch::nn::LinearImpl without. Leave it out.",
                 refused({torch::nn::Linear(1, 1).ptr()}));
}

}  // namespace
}  // namespace torchfuse::sharded_testing
