// SPDX-License-Identifier: BSD-3-Clause
// Gradients that are reduced to parts train as whole ones do.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/torchfuse.h>

#include <cmath>
#include <string>
#include <vector>

#include "../optim/optim_testing.h"
#include "parallel_testing.h"
#include "scattered_testing.h"

namespace torchfuse::sharded_testing {
namespace {

using optim::FusedAdam;
using optim::FusedAdamOptions;
using optim::FusedLAMB;
using optim::FusedLAMBOptions;
using parallel::ProcessGroup;
using parallel::ShardedOptimizer;
using testing::expect_close;
using testing::expect_equal;

/// Trains with whole gradients, or with parts.
template <class Optimizer, class Options>
std::vector<torch::Tensor> trained(ProcessGroup& group, const Options& options, bool scatters,
                                   torch::ScalarType dtype = torch::kFloat) {
  ScatteredNet net(dtype);
  ScatteredModel model(net, group, small_buckets());
  const auto train = [&](auto&& optimizer) {
    for (int step = 0; step < kShardedSteps; ++step) {
      optimizer.zero_grad();
      scattered_loss(model, group.rank(), step).backward();
      optimizer.step();
    }
  };
  if (scatters) {
    train(ShardedOptimizer<Optimizer>(net->parameters(), options, model));
  } else {
    train(ShardedOptimizer<Optimizer>(net->parameters(), options, group));
  }
  return values_of(*net);
}

TEST(ScatteredGradients, TwoRanksTrainAsWithWholeGradientsBitForBit) {
  run_on_ranks(2, [](ProcessGroup& group) {
    const auto options = FusedAdamOptions(0.01).weight_decay(0.1);
    expect_equal(trained<FusedAdam>(group, options, true),
                 trained<FusedAdam>(group, options, false));
    const auto masters = FusedAdamOptions(0.01).master_weights(true);
    expect_equal(trained<FusedAdam>(group, masters, true, torch::kBFloat16),
                 trained<FusedAdam>(group, masters, false, torch::kBFloat16));
  });
}

TEST(ScatteredGradients, ThreeRanksTrainAsWithWholeGradientsUpToTheOrderOfSums) {
  run_on_ranks(3, [](ProcessGroup& group) {
    expect_close(trained<FusedAdam>(group, FusedAdamOptions(0.01).max_grad_norm(0.1), true),
                 trained<FusedAdam>(group, FusedAdamOptions(0.01).max_grad_norm(0.1), false));
    expect_close(trained<FusedLAMB>(group, FusedLAMBOptions(0.01), true),
                 trained<FusedLAMB>(group, FusedLAMBOptions(0.01), false));
  });
}

TEST(ScatteredGradients, AProcessThatIsAloneTrainsAsTheClass) {
  run_on_ranks(1, [](ProcessGroup& group) {
    const auto found = trained<FusedAdam>(group, FusedAdamOptions(0.01), true);
    ScatteredNet net;
    ScatteredModel model(net, group);
    FusedAdam alone(net->parameters(), FusedAdamOptions(0.01));
    for (int step = 0; step < kShardedSteps; ++step) {
      alone.zero_grad();
      scattered_loss(model, 0, step).backward();
      alone.step();
    }
    expect_equal(found, values_of(*net));
  });
}

TEST(ScatteredGradients, EachRankKeepsItsPartOfTheGradientsAlone) {
  run_on_ranks(3, [](ProcessGroup& group) {
    ScatteredNet net;
    ScatteredModel model(net, group, small_buckets());
    ShardedOptimizer<FusedAdam> optimizer(net->parameters(), {}, model);
    scattered_loss(model, group.rank(), 0).backward();
    std::int64_t own = 0;
    for (const torch::Tensor& part : optimizer.param_groups()[0].params()) {
      ASSERT_TRUE(part.grad().defined());
      EXPECT_EQ(part.grad().sizes(), part.sizes());
      own += part.grad().numel();
    }
    std::int64_t all = 0;
    for (const torch::Tensor& param : net->parameters()) {
      EXPECT_FALSE(param.grad().defined());
      all += param.numel();
    }
    EXPECT_GT(model.buckets().size(), 2);
    // A cache line for each bucket at most.
    EXPECT_LE(own, all / 3 + 16 * static_cast<std::int64_t>(model.buckets().size()));
    const torch::Tensor sum = torch::full({}, own);
    all_reduce_(sum, "sum", {group.name()});
    EXPECT_EQ(sum.item<std::int64_t>(), all);
  });
}

/// The gradients of the parts, in one tensor.
torch::Tensor gradients_of(const optim::FusedOptimizer& optimizer) {
  std::vector<torch::Tensor> grads;
  for (const torch::Tensor& part : optimizer.param_groups()[0].params()) {
    grads.push_back(part.grad());
  }
  return torch::cat(grads);
}

TEST(ScatteredGradients, BackwardAddsUntilAStepOrZeroGrad) {
  run_on_ranks(2, [](ProcessGroup& group) {
    ScatteredNet net;
    ScatteredModel model(net, group, small_buckets());
    ShardedOptimizer<FusedAdam> optimizer(net->parameters(), FusedAdamOptions(0.0), model);
    const auto backward = [&](int step) { scattered_loss(model, group.rank(), step).backward(); };
    backward(0);
    const torch::Tensor first = gradients_of(optimizer).clone();
    optimizer.step();
    EXPECT_FALSE(optimizer.param_groups()[0].params()[0].grad().defined());
    backward(1);
    const torch::Tensor second = gradients_of(optimizer).clone();
    backward(0);
    EXPECT_TRUE(torch::equal(gradients_of(optimizer), first + second));
    optimizer.zero_grad();
    backward(0);
    EXPECT_TRUE(torch::equal(gradients_of(optimizer), first));
    optimizer.zero_grad(/*set_to_none=*/false);
    EXPECT_EQ(gradients_of(optimizer).abs().sum().item<double>(), 0.0);
    static_cast<torch::optim::Optimizer&>(optimizer).zero_grad();
    EXPECT_FALSE(optimizer.param_groups()[0].params()[0].grad().defined());
    {
      const auto local = model.no_sync();
      backward(1);
      EXPECT_TRUE(net->gain.grad().defined());
      EXPECT_FALSE(optimizer.param_groups()[0].params()[0].grad().defined());
    }
    backward(0);
    EXPECT_FALSE(net->gain.grad().defined());
    EXPECT_TRUE(torch::allclose(gradients_of(optimizer), first + second, 1e-5, 1e-7));
  });
}

/// In the second of three steps one rank's part of the batch is infinite: nobody may step.
/// @param how "step", "unscale_", or "group": the scaler has one of its process alone.
void train_with_an_overflow(ProcessGroup& group, const std::string& how) {
  ScatteredNet net;
  ScatteredModel model(net, group, small_buckets());
  ShardedOptimizer<FusedAdam> optimizer(net->parameters(), FusedAdamOptions().max_grad_norm(1.0),
                                        model);
  auto first = group.new_group({0});
  auto second = group.new_group({1});
  auto options = amp::GradScalerOptions().init_scale(1024.0);
  if (how == "group") options.process_group((group.rank() == 0 ? first : second)->name());
  amp::GradScaler scaler(torch::kCPU, options);
  for (int step = 0; step < 3; ++step) {
    const auto before = values_of(*net);
    const torch::Tensor loss = scattered_loss(model, group.rank(), step);
    // One element of one parameter: the other rank's part is finite.
    if (step == 1 && group.rank() == 1) {
      net->first->bias.register_hook([](const torch::Tensor& grad) {
        torch::Tensor bad = grad.clone();
        bad[0] = INFINITY;
        return bad;
      });
    }
    scaler.scale(loss).backward();
    if (step == 1 && group.rank() == 1) net->first->bias.remove_hook(0);
    if (how == "unscale_") scaler.unscale_(optimizer);
    scaler.step(optimizer);
    scaler.update();
    bool moved = false;
    const auto after = values_of(*net);
    for (std::size_t i = 0; i < after.size(); ++i) moved |= !torch::equal(after[i], before[i]);
    EXPECT_EQ(moved, step != 1);
    EXPECT_EQ(optimizer.last_step_skipped().item<double>(), step == 1 ? 1.0 : 0.0);
    EXPECT_EQ(scaler.get_scale(), step == 0 ? 1024.0 : 512.0);
  }
}

TEST(ScatteredGradients, AnOverflowInOnePartSkipsTheStepOnAllRanks) {
  for (const std::string how : {"step", "unscale_", "group"}) {
    SCOPED_TRACE(how);
    run_on_ranks(2, [&](ProcessGroup& group) { train_with_an_overflow(group, how); });
  }
}

TEST(ScatteredGradients, ParametersThatNoRankUsesHaveNone) {
  run_on_ranks(2, [](ProcessGroup& group) {
    ScatteredNet net;
    ScatteredModel model(net, group, small_buckets().find_unused_parameters(true));
    ShardedOptimizer<FusedAdam> optimizer(net->parameters(), FusedAdamOptions(0.01), model);
    const auto before = values_of(*net);
    for (int step = 0; step < 2; ++step) {
      // Rank 1 alone uses the gain; nobody the rest but the last layer.
      const torch::Tensor output = model.forward(waves({5, 6}, 1.0).to(torch::kFloat));
      const torch::Tensor used = net->last(waves({5, 58}, 2.0).to(torch::kFloat)).sum();
      (group.rank() == 1 ? used * net->gain : used + 0.0 * output.detach().sum()).backward();
      optimizer.step();
    }
    const auto after = values_of(*net);
    const auto names = net->named_parameters();
    for (std::size_t i = 0; i < after.size(); ++i) {
      const std::string& name = names[i].key();
      EXPECT_EQ(torch::equal(after[i], before[i]),
                name.rfind("first", 0) == 0 || name.rfind("conv", 0) == 0)
          << name;
    }
  });
}

TEST(ScatteredGradients, StatesAreThoseOfTheWholeOptimizer) {
  run_on_ranks(2, [](ProcessGroup& group) {
    ScatteredNet net;
    ScatteredModel model(net, group, small_buckets());
    ShardedOptimizer<FusedAdam> optimizer(net->parameters(), FusedAdamOptions(0.01), model);
    ScatteredNet twin;
    ScatteredModel whole_model(twin, group);
    FusedAdam whole(twin->parameters(), FusedAdamOptions(0.01));
    const auto step = [&](int number) {
      whole.zero_grad();
      scattered_loss(model, group.rank(), number).backward();
      scattered_loss(whole_model, group.rank(), number).backward();
      optimizer.step();
      whole.step();
    };
    step(0);
    // Each continues with what the other has saved.
    const auto saved = optimizer.state_dict();
    optimizer.load_state_dict(whole.state_dict());
    whole.load_state_dict(saved);
    step(1);
    expect_equal(values_of(*net), values_of(*twin));
  });
}

}  // namespace
}  // namespace torchfuse::sharded_testing
