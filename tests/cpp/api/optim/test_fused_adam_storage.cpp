// SPDX-License-Identifier: BSD-3-Clause
// FusedAdam's storage options: moments of any dtype, remainders, stochastic rounding, and their
// archives.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <torchfuse/fused_step.h>
#include <torchfuse/optim/fused_adam.h>

#include "optim_testing.h"

namespace torchfuse::optim {
namespace {

using testing::copy_of;
using testing::expect_equal;
using testing::expect_error;
using testing::make_params;
using testing::options_of;
using testing::run_steps;
using testing::set_grads;
using testing::state_of;
using torch::optim::OptimizerParamGroup;

std::string saved(const FusedAdam& optimizer) {
  std::ostringstream stream;
  torch::save(optimizer, stream);
  return stream.str();
}

void load(FusedAdam& optimizer, const std::string& bytes) {
  std::istringstream stream(bytes);
  torch::load(optimizer, stream);
}

FusedAdamOptions remainders() {
  return FusedAdamOptions(1e-3).weight_decay(0.1).master_weights(true).store_param_remainders(true);
}

torch::Tensor master_in(FusedAdam& optimizer, const torch::Tensor& param) {
  return master_of_remainder(param, state_of(optimizer, param).param_remainder());
}

TEST(FusedAdamStorage, MomentsHaveTheDtypesOfTheirNames) {
  for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kHalf}) {
    const auto params = make_params(dtype);
    FusedAdam optimizer(params, FusedAdamOptions()
                                    .amsgrad(true)
                                    .state_dtype(torch::kBFloat16)
                                    .exp_avg_sq_dtype(torch::kHalf));
    run_steps(optimizer, params, 0, 2);
    const FusedAdamParamState& state = state_of(optimizer, params[0]);
    EXPECT_EQ(state.exp_avg().scalar_type(), torch::kBFloat16);
    EXPECT_EQ(state.exp_avg_sq().scalar_type(), torch::kHalf);
    EXPECT_EQ(state.max_exp_avg_sq().scalar_type(), torch::kHalf);
  }
}

TEST(FusedAdamStorage, AStepRoundsItsMomentsOnce) {
  const auto params = make_params();
  const auto copies = copy_of(params);
  FusedAdam narrow(params, FusedAdamOptions(1e-2).exp_avg_dtype(torch::kBFloat16));
  FusedAdam wide(copies, FusedAdamOptions(1e-2));
  run_steps(narrow, params, 0, 1);
  run_steps(wide, copies, 0, 1);
  expect_equal(params, copies);
  for (std::size_t i = 0; i < params.size(); ++i) {
    EXPECT_TRUE(torch::equal(state_of(narrow, params[i]).exp_avg(),
                             state_of(wide, copies[i]).exp_avg().to(torch::kBFloat16)));
    EXPECT_TRUE(torch::equal(state_of(narrow, params[i]).exp_avg_sq(),
                             state_of(wide, copies[i]).exp_avg_sq()));
  }
}

TEST(FusedAdamStorage, RemaindersGiveTheMastersOfFp32Masters) {
  const auto params = make_params(torch::kBFloat16);
  const auto copies = copy_of(params);
  FusedAdam halves(params, remainders());
  FusedAdam whole(copies, remainders().store_param_remainders(false));
  for (int step = 0; step < 20; ++step) {
    run_steps(halves, params, step, step + 1);
    run_steps(whole, copies, step, step + 1);
    for (std::size_t i = 0; i < params.size(); ++i) {
      EXPECT_FALSE(state_of(halves, params[i]).master_param().defined());
      EXPECT_FALSE(state_of(whole, copies[i]).param_remainder().defined());
      EXPECT_TRUE(
          torch::equal(master_in(halves, params[i]), state_of(whole, copies[i]).master_param()));
    }
  }
}

TEST(FusedAdamStorage, TheFormOfTheMasterMayChangeBetweenSteps) {
  const auto params = make_params(torch::kBFloat16);
  const auto copies = copy_of(params);
  FusedAdam changing(params, remainders());
  FusedAdam whole(copies, remainders().store_param_remainders(false));
  run_steps(changing, params, 0, 3);
  run_steps(whole, copies, 0, 3);
  options_of(changing).store_param_remainders(false);
  run_steps(changing, params, 3, 4);
  run_steps(whole, copies, 3, 4);
  for (std::size_t i = 0; i < params.size(); ++i) {
    EXPECT_FALSE(state_of(changing, params[i]).param_remainder().defined());
    EXPECT_TRUE(torch::equal(state_of(changing, params[i]).master_param(),
                             state_of(whole, copies[i]).master_param()));
  }
  options_of(changing).store_param_remainders(true);
  run_steps(changing, params, 4, 5);
  EXPECT_FALSE(state_of(changing, params[0]).master_param().defined());
  EXPECT_EQ(state_of(changing, params[0]).param_remainder().scalar_type(), torch::kShort);
}

TEST(FusedAdamStorage, StochasticRoundingDependsOnTheSeedAndThePlaceOfTheParameter) {
  const auto options = [](int64_t seed) {
    return FusedAdamOptions(1e-2).stochastic_rounding(true).seed(seed);
  };
  const auto run = [&](int64_t seed) {
    const auto params = make_params(torch::kBFloat16);
    FusedAdam optimizer(params, options(seed));
    run_steps(optimizer, params, 0, 5);
    return params;
  };
  const auto expected = run(3);
  expect_equal(run(3), expected);
  EXPECT_FALSE(torch::equal(run(4)[0], expected[0]));

  // In two groups, and with gradients for the last parameter alone.
  const auto split = make_params(torch::kBFloat16);
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<torch::Tensor>{split[0], split[1]});
  groups.emplace_back(std::vector<torch::Tensor>{split[2], split[3], split[4]});
  FusedAdam optimizer(groups, options(3));
  for (int step = 0; step < 5; ++step) {
    set_grads(split, step);
    for (std::size_t i = 0; i < 4; ++i) split[i].mutable_grad() = torch::Tensor();
    optimizer.step();
  }
  EXPECT_TRUE(torch::equal(split[4], expected[4]));
}

TEST(FusedAdamStorage, StochasticRoundingKeepsTheMean) {
  const auto start = torch::ones({1 << 18}, torch::kBFloat16);
  const auto param = start.clone().requires_grad_(true);
  FusedAdam optimizer(std::vector<torch::Tensor>{param},
                      FusedAdamOptions(0x1p-12).eps(0.0).stochastic_rounding(true));
  for (int step = 0; step < 8; ++step) {
    param.mutable_grad() = torch::ones_like(param);
    optimizer.step();
  }
  // Eight times 2^-8 with the chance 1/16.
  const double deviation = 0x1p-8 * std::sqrt(8.0 / 16.0 / (1 << 18));
  EXPECT_NEAR(param.detach().to(torch::kDouble).mean().item<double>(), 1.0 - 8 * 0x1p-12,
              5 * deviation);
}

TEST(FusedAdamStorage, ArchivesGoOnBitForBit) {
  for (const FusedAdamOptions& options :
       {remainders(), remainders().exp_avg_dtype(torch::kBFloat16),
        FusedAdamOptions(1e-2).stochastic_rounding(true).seed(9).state_dtype(torch::kHalf)}) {
    const auto params = make_params(torch::kBFloat16);
    FusedAdam optimizer(params, options);
    run_steps(optimizer, params, 0, 3);
    const auto copies = copy_of(params);
    FusedAdam restored(copies);
    load(restored, saved(optimizer));
    EXPECT_EQ(options_of(restored).state_dtype(), options.state_dtype());
    EXPECT_EQ(options_of(restored).exp_avg_dtype(), options.exp_avg_dtype());
    EXPECT_EQ(options_of(restored).seed(), options.seed());
    run_steps(optimizer, params, 3, 5);
    run_steps(restored, copies, 3, 5);
    expect_equal(copies, params);
    for (std::size_t i = 0; i < params.size(); ++i) {
      const FusedAdamParamState& a = state_of(restored, copies[i]);
      const FusedAdamParamState& b = state_of(optimizer, params[i]);
      EXPECT_EQ(a.exp_avg().scalar_type(), b.exp_avg().scalar_type());
      expect_equal({a.exp_avg(), a.exp_avg_sq()}, {b.exp_avg(), b.exp_avg_sq()});
      ASSERT_EQ(a.param_remainder().defined(), options.store_param_remainders());
      if (a.param_remainder().defined()) {
        EXPECT_TRUE(torch::equal(a.param_remainder(), b.param_remainder()));
      }
    }
  }
}

TEST(FusedAdamStorage, ArchivesThatDoNotFitAreRefused) {
  const auto params = make_params(torch::kBFloat16);
  FusedAdam optimizer(params, remainders());
  run_steps(optimizer, params, 0, 1);
  const std::string bytes = saved(optimizer);
  const auto wide = make_params();
  FusedAdam other(wide);
  expect_error([&] { load(other, bytes); },
               "expected param_groups[0] to hold a BFloat16 parameter with store_param_remainders");
  FusedAdamParamState& state = state_of(optimizer, params[1]);
  state.param_remainder(state.param_remainder().to(torch::kInt));
  const auto copies = copy_of(params);
  FusedAdam restored(copies);
  const std::string broken = saved(optimizer);
  expect_error([&] { load(restored, broken); },
               "state[1].param_remainder to have dtype Short for a BFloat16 parameter, got Int");
  EXPECT_TRUE(restored.state().empty());
}

TEST(FusedAdamStorage, RemaindersAndMastersConvertExactly) {
  const torch::Tensor masters = torch::randn({4096});
  const torch::Tensor remainder = remainder_of_master(masters);
  EXPECT_TRUE(torch::equal(master_of_remainder(masters.to(torch::kBFloat16), remainder), masters));
  // Halfway between two parameters, the even one of which is nearer to zero: one unit is lost.
  const torch::Tensor tie = torch::full({1}, 1.0 + 0x1p-8);
  EXPECT_EQ(remainder_of_master(tie).item<int>(), 32767);
  expect_error([&] { master_of_remainder(masters, remainder); },
               "expected param to be of dtype bfloat16, got Float");
  expect_error([&] { remainder_of_master(remainder); },
               "expected master to be of dtype float32, got Short");
}

TEST(FusedAdamStorage, OptionsThatDoNotFitAreRefusedByName) {
  using Options = FusedAdamOptions;
  const auto refused = [](torch::ScalarType dtype, const Options& options,
                          const std::string& text) {
    expect_error([&] { FusedAdam optimizer(make_params(dtype), options); }, "FusedAdam: " + text);
  };
  refused(torch::kBFloat16, Options().store_param_remainders(true),
          "expected defaults.master_weights to be true with store_param_remainders");
  refused(torch::kFloat, remainders(),
          "expected param_groups[0] to hold a BFloat16 parameter with store_param_remainders");
  refused(
      torch::kHalf, remainders(),
      "expected param_groups[0].params[0] to be BFloat16 with store_param_remainders, got Half");
  refused(torch::kBFloat16, Options().stochastic_rounding(true).master_weights(true),
          "expected defaults.master_weights to be false with stochastic_rounding");
  refused(torch::kFloat, Options().stochastic_rounding(true),
          "expected param_groups[0].params[0] to be BFloat16 with stochastic_rounding, got Float");
  refused(torch::kBFloat16, Options().seed(-1), "expected defaults.seed to be at least 0, got -1");
  refused(torch::kFloat, Options().exp_avg_dtype(torch::kDouble),
          "expected param_groups[0].exp_avg_dtype to be Float, BFloat16 or Half for params[0]");
  refused(torch::kDouble, Options().state_dtype(torch::kFloat),
          "expected param_groups[0].state_dtype to be Double for params[0] of dtype Double");
}

TEST(FusedAdamStorage, ASeedHoldsForAllGroups) {
  const auto params = make_params(torch::kBFloat16);
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<torch::Tensor>{params[0]},
                      std::make_unique<FusedAdamOptions>(FusedAdamOptions().seed(2)));
  expect_error([&] { FusedAdam optimizer(groups, FusedAdamOptions()); },
               "expected param_groups[0].seed to equal the optimizer's own");
}

}  // namespace
}  // namespace torchfuse::optim
