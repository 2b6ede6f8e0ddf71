// SPDX-License-Identifier: BSD-3-Clause
// Averages of the parameters of every class: formula, evaluation, archives.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <string>
#include <vector>

#include <torchfuse/ema.h>
#include <torchfuse/masters.h>

#include "all_classes.h"
#include "optim_testing.h"

namespace torchfuse::optim {
namespace {

using testing::all_states;
using testing::copy_of;
using testing::expect_equal;
using testing::expect_error;
using testing::expect_same_state;
using testing::load;
using testing::make_params;
using testing::options_of;
using testing::run_steps;
using testing::saved;
using testing::state_of;

constexpr double kDecay = 0.75;

template <class Options>
Options averages() {
  return all_states<Options>().ema_decay(kDecay);
}

template <class Optimizer>
std::vector<torch::Tensor> averages_in(Optimizer& optimizer,
                                       const std::vector<torch::Tensor>& params) {
  std::vector<torch::Tensor> found;
  for (const torch::Tensor& param : params) {
    found.push_back(state_of(optimizer, param).ema_param().clone());
  }
  return found;
}

std::vector<torch::Tensor> values_of(const std::vector<torch::Tensor>& params) {
  std::vector<torch::Tensor> values;
  for (const torch::Tensor& param : params) values.push_back(param.detach().clone());
  return values;
}

template <class Type>
class Ema : public ::testing::Test {};
TYPED_TEST_SUITE(Ema, testing::AllClasses, testing::ClassNames);

TYPED_TEST(Ema, EveryStepGivesTheFormulaInFp64) {
  for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kBFloat16}) {
    const auto params = make_params(dtype);
    const bool narrow = dtype == torch::kBFloat16;
    typename TypeParam::Optimizer optimizer(
        params,
        averages<typename TypeParam::Options>().master_weights(narrow).ema_start_step(1).ema_warmup(
            true));
    std::vector<torch::Tensor> expected(params.size());
    for (int step = 1; step <= 10; ++step) {
      run_steps(optimizer, params, step, step + 1);
      const double n = step - 1;
      const double decay = n == 0 ? 0.0 : std::min(kDecay, (1 + n) / (10 + n));
      for (std::size_t i = 0; i < params.size(); ++i) {
        auto& state = state_of(optimizer, params[i]);
        const torch::Tensor value = (narrow ? state.master_param() : params[i].detach())
                                        .to(torch::kDouble, /*non_blocking=*/false, /*copy=*/true);
        expected[i] = n == 0 ? value : decay * expected[i] + (1 - decay) * value;
        const bool wide = dtype == torch::kDouble;
        ASSERT_EQ(state.ema_param().scalar_type(), wide ? torch::kDouble : torch::kFloat);
        const double tolerance = wide ? 1e-14 : 5e-7;
        EXPECT_TRUE(torch::allclose(state.ema_param().to(torch::kDouble), expected[i], tolerance,
                                    tolerance));
      }
    }
  }
}

TYPED_TEST(Ema, NothingElseDependsOnThem) {
  const auto params = make_params();
  const auto copies = copy_of(params);
  typename TypeParam::Optimizer with(params, averages<typename TypeParam::Options>());
  typename TypeParam::Optimizer without(copies, all_states<typename TypeParam::Options>());
  run_steps(with, params, 0, 3);
  run_steps(without, copies, 0, 3);
  expect_equal(params, copies);
  EXPECT_FALSE(state_of(without, copies[0]).ema_param().defined());
}

TYPED_TEST(Ema, ParametersHoldThemAndGetTheirValuesBack) {
  for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
    const auto params = make_params(dtype);
    typename TypeParam::Optimizer optimizer(
        params, averages<typename TypeParam::Options>().master_weights(dtype == torch::kBFloat16));
    run_steps(optimizer, params, 0, 3);
    const auto values = values_of(params);
    const auto before = averages_in(optimizer, params);
    {
      const EmaWeights weights(optimizer);
      for (std::size_t i = 0; i < params.size(); ++i) {
        EXPECT_TRUE(torch::equal(params[i], before[i].to(dtype)));
      }
    }
    expect_equal(params, values);
    expect_equal(averages_in(optimizer, params), before);
  }
}

TYPED_TEST(Ema, StepsAndArchivesAreRefusedWhileTheyAreInTheirPlace) {
  const auto params = make_params();
  typename TypeParam::Optimizer optimizer(params, averages<typename TypeParam::Options>());
  run_steps(optimizer, params, 0, 2);
  const std::string archive = saved(optimizer);
  optimizer.swap_ema_();
  const auto swapped = values_of(params);
  const std::string expected =
      "expected the parameters to hold their own values, got their averages";
  const std::string name = testing::class_name<TypeParam>();
  expect_error([&] { optimizer.step(); }, name + "::step: " + expected);
  expect_error([&] { saved(optimizer); }, name + "::save: " + expected);
  expect_error([&] { load(optimizer, archive); }, name + "::load: " + expected);
  expect_error([&] { const EmaWeights again(optimizer); }, name + "::EmaWeights: " + expected);
  expect_equal(params, swapped);
  optimizer.swap_ema_();
  run_steps(optimizer, params, 2, 3);
}

TYPED_TEST(Ema, AnArchiveGoesOnWithThem) {
  using Options = typename TypeParam::Options;
  const auto params = make_params(torch::kBFloat16);
  typename TypeParam::Optimizer optimizer(
      params, averages<Options>().master_weights(true).ema_warmup(true).ema_start_step(1));
  run_steps(optimizer, params, 0, 3);
  const auto copies = copy_of(params);
  typename TypeParam::Optimizer loaded(copies, all_states<Options>().master_weights(true));
  load(loaded, saved(optimizer));
  EXPECT_TRUE(options_of(loaded) == options_of(optimizer));
  run_steps(optimizer, params, 3, 5);
  run_steps(loaded, copies, 3, 5);
  for (std::size_t i = 0; i < params.size(); ++i) {
    expect_same_state(state_of(loaded, copies[i]), state_of(optimizer, params[i]));
  }
}

TEST(EmaOptions, AreRefusedOutOfTheirRange) {
  for (const double decay : {1.0, -0.1, std::nan("")}) {
    expect_error([&] { FusedAdam(make_params(), FusedAdamOptions().ema_decay(decay)); },
                 "FusedAdam: expected defaults.ema_decay to be none, or at least 0 and less than "
                 "1, got ");
  }
  expect_error([&] { FusedAdam(make_params(), FusedAdamOptions().ema_start_step(-1)); },
               "FusedAdam: expected defaults.ema_start_step to be at least 0, got -1");
}

TEST(EmaOptions, HoldForAllGroups) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(make_params());
  groups.emplace_back(make_params(), std::make_unique<FusedAdamOptions>());
  expect_error([&] { FusedAdam(groups, FusedAdamOptions().ema_decay(0.5)); },
               "expected param_groups[1].ema_decay to equal the optimizer's own");
}

TEST(SwapEma, RefusesWhatDoesNotFit) {
  const torch::Tensor param = torch::ones({2}, torch::kHalf);
  expect_error([&] { swap_ema_(param, torch::zeros({2}, torch::kHalf)); },
               "swap_ema_: expected ema to be of dtype Float for a Half parameter, got Half");
  expect_error([&] { swap_ema_(param, torch::zeros({3})); }, "swap_ema_: expected ema to have");
  expect_error([&] { swap_ema_(torch::ones({2}, torch::kLong), torch::zeros({2})); },
               "swap_ema_: expected param to be a floating-point tensor, got Long");
  const torch::Tensor kept = torch::zeros({2}, torch::kBFloat16);
  expect_error(
      [&] { swap_ema_(param, torch::zeros({2}), kept); },
      "swap_ema_: expected param to be of dtype BFloat16, as when it received its average, "
      "got Half. Convert it back first.");
  EXPECT_TRUE(torch::equal(param, torch::ones({2}, torch::kHalf)));
}

TEST(SwapEma, RefusesWhatCannotBeWrittenBeforeItWrites) {
  const auto inference = [] {
    const c10::InferenceMode guard;
    return torch::zeros({2});
  }();
  const torch::Tensor param = torch::ones({2});
  expect_error([&] { swap_ema_(param, inference); },
               "swap_ema_: expected ema to be a tensor that can be written, got one made in "
               "inference mode. Make it, or clone it, outside of inference mode.");
  expect_error([&] { swap_ema_(param, torch::zeros({1}).expand({2})); },
               "swap_ema_: expected ema to have memory for each of its elements");
  EXPECT_TRUE(torch::equal(param, torch::ones({2})));
  const torch::Tensor ema = torch::zeros({2});
  expect_error([&] { swap_ema_(inference, ema); }, "swap_ema_: expected param to be a tensor that");
  expect_error([&] { swap_ema_(torch::ones({1}).expand({2}), ema); },
               "swap_ema_: expected param to have memory for each of its elements");
  EXPECT_TRUE(torch::equal(ema, torch::zeros({2})));
  // A parameter of 16 bits leaves its average as it is.
  const torch::Tensor narrow = torch::ones({2}, torch::kHalf);
  swap_ema_(narrow, inference);
  EXPECT_TRUE(torch::equal(narrow, torch::zeros({2}, torch::kHalf)));
}

}  // namespace
}  // namespace torchfuse::optim
