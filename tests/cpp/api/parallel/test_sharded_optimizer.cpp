// SPDX-License-Identifier: BSD-3-Clause
// An optimizer whose states are split over ranks computes what the class alone does: every class
// with every storage, then what FusedAdam shows.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/parallel/sharded_optimizer.h>
#include <torchfuse/torchfuse.h>

#include <cmath>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "../optim/all_classes.h"
#include "../optim/optim_testing.h"
#include "sharded_testing.h"

namespace torchfuse::sharded_testing {
namespace {

using parallel::ProcessGroup;
using parallel::ShardedOptimizer;
using namespace testing;  // NOLINT(google-build-using-namespace): all helpers

struct Storage {
  const char* name;
  torch::ScalarType dtype;
  bool masters;
  bool remainders;
  bool averages;
};

const std::vector<Storage>& storages() {
  static const std::vector<Storage> all{
      {"fp32", torch::kFloat, false, false, false},
      {"fp64", torch::kDouble, false, false, true},
      {"bf16", torch::kBFloat16, false, false, true},
      {"masters", torch::kHalf, true, false, false},
      {"remainders", torch::kBFloat16, true, true, false},
  };
  return all;
}

template <class Options>
Options options_with(const Storage& storage) {
  Options options = testing::all_states<Options>();
  options.weight_decay(0.1).master_weights(storage.masters);
  options.store_param_remainders(storage.remainders);
  if (storage.averages) options.ema_decay(0.9);
  return options;
}

/// All tensors of the state dict, in the order of parameters and names.
std::vector<std::pair<std::string, torch::Tensor>> tensors_of(const optim::FusedOptimizer& from) {
  std::vector<std::pair<std::string, torch::Tensor>> found;
  const auto states = from.state_dict().at("state").toGenericDict();
  for (const auto& entry : states) {
    for (const auto& value : entry.value().toGenericDict()) {
      found.emplace_back(c10::str(entry.key(), ".", value.key().toStringRef()),
                         value.value().toTensor());
    }
  }
  return found;
}

/// Whether each element's update depends on that element alone, or, with one matrix at a time, on
/// the element's matrix alone.
template <class Options>
constexpr bool kElementwise = !(std::is_same_v<Options, optim::FusedLAMBOptions> ||
                                std::is_same_v<Options, optim::FusedNovoGradOptions> ||
                                std::is_same_v<Options, optim::FusedLARSOptions>);

void expect_same(const torch::Tensor& found, const torch::Tensor& expected, bool exactly,
                 double bound, const std::string& what) {
  ASSERT_EQ(found.sizes(), expected.sizes()) << what;
  ASSERT_EQ(found.scalar_type(), expected.scalar_type()) << what;
  if (exactly) {
    EXPECT_TRUE(torch::equal(found, expected)) << what;
    return;
  }
  const auto reference = expected.detach().to(torch::kDouble);
  const auto difference = (found.detach().to(torch::kDouble) - reference).norm().item<double>();
  EXPECT_LE(difference, bound * reference.norm().item<double>()) << what;
}

template <class Type>
class ShardedClasses : public ::testing::Test {};
TYPED_TEST_SUITE(ShardedClasses, AllClasses, ClassNames);

TYPED_TEST(ShardedClasses, TrainAsTheClassAlone) {
  using Options = typename TypeParam::Options;
  for (const Storage& storage : storages()) {
    for (const bool clips : {false, true}) {
      SCOPED_TRACE(c10::str(storage.name, clips ? ", clipped" : ""));
      Options options = options_with<Options>(storage);
      if constexpr (requires { options.ns_batched(); }) options.ns_batched(false);
      if (clips) options.max_grad_norm(0.5);
      const auto alone = sharded_params(storage.dtype);
      typename TypeParam::Optimizer whole(alone, options);
      train_sharded(whole, alone);
      const auto expected = tensors_of(whole);
      run_on_ranks(2, [&](ProcessGroup& group) {
        const auto params = sharded_params(storage.dtype);
        ShardedOptimizer<typename TypeParam::Optimizer> sharded(params, options, group);
        train_sharded(sharded, params);
        const bool exactly = kElementwise<Options> && !clips;
        // The bits that a remainder adds to a bf16 number count from 2^-16 of it.
        const double bound = storage.remainders ? 1e-3 : 1e-6;
        for (std::size_t i = 0; i < params.size(); ++i) {
          expect_same(params[i], alone[i], exactly, bound, c10::str("parameter ", i));
        }
        const auto found = tensors_of(sharded);
        ASSERT_EQ(found.size(), expected.size());
        for (std::size_t i = 0; i < found.size(); ++i) {
          ASSERT_EQ(found[i].first, expected[i].first);
          expect_same(found[i].second, expected[i].second, exactly, bound, found[i].first);
        }
      });
    }
  }
}

using ShardedAdam = ShardedOptimizer<optim::FusedAdam>;
using optim::FusedAdam;
using optim::FusedAdamOptions;

TEST(ShardedOptimizer, EachRankKeepsItsShareOfTheStates) {
  run_on_ranks(3, [](ProcessGroup& group) {
    const std::vector<torch::Tensor> params{torch::randn({1000, 77}, torch::requires_grad()),
                                            torch::randn({13}, torch::requires_grad())};
    ShardedAdam optimizer(params, {}, group);
    set_waves_as_grads(params, 0);
    optimizer.step();
    std::int64_t own = 0;
    for (const auto& [key, state] : optimizer.state()) {
      const auto& held = static_cast<const optim::FusedAdamParamState&>(*state);
      own += held.exp_avg().numel() + held.exp_avg_sq().numel();
    }
    const std::int64_t whole = 2 * (77'000 + 13);
    EXPECT_LE(own, whole / 3 + 64);
    const torch::Tensor sum = torch::full({}, own);
    all_reduce_(sum, "sum", {group.name()});
    EXPECT_EQ(sum.item<std::int64_t>(), whole);
  });
}

/// In the second step an element is infinite that the last rank owns: nobody may step.
void train_with_an_overflow(ProcessGroup& group, bool unscales, bool group_of_scaler) {
  const auto params = sharded_params();
  ShardedAdam optimizer(params, FusedAdamOptions().max_grad_norm(1.0), group);
  auto options = amp::GradScalerOptions().init_scale(1024.0);
  if (group_of_scaler) options.process_group(group.name());
  amp::GradScaler scaler(torch::kCPU, options);
  scaler.scale(torch::zeros({}));
  for (int step = 0; step < 3; ++step) {
    const auto before = copy_of(params);
    set_waves_as_grads(params, step, scaler.get_scale());
    if (step == 1) params.back().mutable_grad()[-1][-1][-1][-1] = INFINITY;
    if (unscales) {
      scaler.unscale_(optimizer);
      if (step == 2) {
        EXPECT_LE(params[2].grad().abs().max().item<double>(), 1.0);
      }
    }
    scaler.step(optimizer);
    scaler.update();
    bool moved = false;
    for (std::size_t i = 0; i < params.size(); ++i) moved |= !torch::equal(params[i], before[i]);
    EXPECT_EQ(moved, step != 1);
    EXPECT_EQ(optimizer.last_step_skipped().item<double>(), step == 1 ? 1.0 : 0.0);
    EXPECT_EQ(scaler.get_scale(), step == 0 ? 1024.0 : 512.0);
  }
  double squares = 0.0;
  for (std::size_t i = 0; i < params.size(); ++i) {
    squares +=
        waves(params[i].sizes(), 30.0 + static_cast<double>(i)).square().sum().item<double>();
  }
  EXPECT_NEAR(optimizer.grad_norm().item<double>(), std::sqrt(squares), 1e-4 * std::sqrt(squares));
}

TEST(ShardedOptimizer, AnOverflowInOnePartSkipsTheStepOnAllRanks) {
  for (const bool both : {false, true}) {
    run_on_ranks(2, [&](ProcessGroup& group) {
      train_with_an_overflow(group, /*unscales=*/both, /*group_of_scaler=*/both);
    });
  }
}

TEST(ShardedOptimizer, MastersAndAveragesAreThoseOfTheClassAlone) {
  run_on_ranks(2, [](ProcessGroup& group) {
    const auto options = FusedAdamOptions(0.01).master_weights(true).ema_decay(0.5);
    const auto alone = sharded_params(torch::kBFloat16);
    FusedAdam whole(alone, options);
    const auto params = sharded_params(torch::kBFloat16);
    ShardedAdam sharded(params, options, group);
    const auto step = [&](auto& optimizer, const auto& values, int number) {
      const torch::NoGradGuard no_grad;
      if (number == 1) values[2].clamp_(-0.5, 0.5);
      if (number == 2) {
        values[0].variable_data().fill_(2.0);
        optimizer.remake_masters();
      }
      set_waves_as_grads(values, number);
      optimizer.step();
    };
    for (int number = 0; number < 3; ++number) {
      step(whole, alone, number);
      step(sharded, params, number);
    }
    expect_equal(params, alone);
    const auto trained = copy_of(params);
    {
      const optim::EmaWeights of_whole(whole);
      const optim::EmaWeights of_sharded(sharded);
      expect_equal(params, alone);
      EXPECT_FALSE(torch::equal(params[2], trained[2]));
      expect_error([&] { sharded.step(); }, "to hold their own values");
    }
    expect_equal(params, trained);
    sharded.swap_ema_();
    whole.swap_ema_();
    expect_equal(params, alone);
    sharded.swap_ema_();
    expect_equal(params, trained);
  });
}

TEST(ShardedOptimizer, StochasticRoundingDrawsAsTheClassAloneDoes) {
  for (const int ranks : {1, 2, 3}) {
    SCOPED_TRACE(ranks);
    run_on_ranks(ranks, [](ProcessGroup& group) {
      const auto options = FusedAdamOptions(0.01).stochastic_rounding(true).seed(5);
      const auto alone = sharded_params(torch::kBFloat16);
      FusedAdam whole(alone, options);
      const auto params = sharded_params(torch::kBFloat16);
      ShardedAdam sharded(params, options, group.get());  // a group of c10d
      for (int number = 0; number < 3; ++number) {
        set_waves_as_grads(alone, number);
        whole.step();
        set_waves_as_grads(params, number);
        sharded.step();
      }
      expect_equal(params, alone);
    });
  }
}

TEST(ShardedOptimizer, DataParallelTrainingIsThatOfOneProcess) {
  const auto fill = [](torch::nn::Module& module) {
    const torch::NoGradGuard no_grad;
    double shift = 0.0;
    for (auto& param : module.parameters()) param.copy_(waves(param.sizes(), shift += 1.0) * 0.3);
  };
  const auto options = FusedAdamOptions(0.01).max_grad_norm(0.1);
  const auto make = [] {
    return torch::nn::Sequential(torch::nn::Linear(5, 7), torch::nn::Tanh(),
                                 torch::nn::Linear(7, 3));
  };
  torch::nn::Sequential alone = make();
  fill(*alone);
  FusedAdam whole(alone->parameters(), options);
  const auto batch = [](int step) { return waves({4, 5}, step).to(torch::kFloat); };
  for (int step = 0; step < kShardedSteps; ++step) {
    whole.zero_grad();
    alone->forward(batch(step)).square().mean().backward();
    whole.step();
  }
  run_on_ranks(2, [&](ProcessGroup& group) {
    torch::nn::Sequential model = make();
    fill(*model);
    parallel::DistributedDataParallel wrapped(model, group);
    ShardedAdam optimizer(model->parameters(), options, group);
    for (int step = 0; step < kShardedSteps; ++step) {
      optimizer.zero_grad(/*set_to_none=*/step % 2 == 0);
      wrapped.forward(batch(step).chunk(2)[group.rank()]).square().mean().backward();
      optimizer.step();
    }
    expect_close(model->parameters(), alone->parameters());
  });
}

TEST(ShardedOptimizer, ZeroGradResetsTheGradientsOfTheModel) {
  run_on_ranks(2, [](ProcessGroup& group) {
    const auto params = sharded_params();
    ShardedAdam optimizer(params, {}, group);
    set_waves_as_grads(params, 0);
    optimizer.step();
    optimizer.zero_grad(/*set_to_none=*/false);
    for (const auto& param : params) EXPECT_TRUE((param.grad() == 0).all().item<bool>());
    optimizer.zero_grad();
    for (const auto& param : params) EXPECT_FALSE(param.grad().defined());
  });
}

TEST(ShardedOptimizer, ParametersWithoutGradientsAndGroupsWithOptionsOfTheirOwn) {
  const auto groups_of = [](const std::vector<torch::Tensor>& params) {
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<torch::Tensor>(params.begin(), params.begin() + 3),
                        std::make_unique<FusedAdamOptions>(0.1));
    groups.emplace_back(std::vector<torch::Tensor>(params.begin() + 3, params.end()));
    return groups;
  };
  const auto run = [](auto& optimizer, const std::vector<torch::Tensor>& params) {
    optim::StepLR scheduler(optimizer, 1, 0.5);
    for (int step = 0; step < kShardedSteps; ++step) {
      set_waves_as_grads(params, step);
      params[2].mutable_grad().reset();
      if (step == 2) params[0].mutable_grad().reset();
      // Gradients that lie in memory in another order than their parameter.
      params.back().mutable_grad() = params.back().grad().contiguous();
      optimizer.step();
      scheduler.step();
    }
  };
  const auto alone = sharded_params();
  FusedAdam whole(groups_of(alone), FusedAdamOptions(0.01));
  run(whole, alone);
  run_on_ranks(3, [&](ProcessGroup& group) {
    const auto params = sharded_params();
    ShardedAdam sharded(groups_of(params), FusedAdamOptions(0.01), group);
    ShardedAdam optimizer(std::move(sharded));
    run(optimizer, params);
    expect_equal(params, alone);
    expect_error([&] { sharded.state_dict(); }, "got a moved-from object");
  });
}

}  // namespace
}  // namespace torchfuse::sharded_testing
