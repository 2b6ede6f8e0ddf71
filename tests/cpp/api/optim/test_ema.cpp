// SPDX-License-Identifier: BSD-3-Clause
// Averages of the parameters of every class: formula and evaluation; test_class_archive.cpp is
// about archives. Then averages in the parameters' place: whatever happens in between, the
// parameters get their values back, or the optimizer says that they did not.
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/torchfuse.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "all_classes.h"
#include "optim_testing.h"

namespace torchfuse::optim {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace): all helpers

constexpr double kDecay = 0.75;

template <class Options>
Options averages() {
  return all_states<Options>().ema_decay(kDecay);
}

template <class Optimizer>
std::vector<torch::Tensor> averages_in(Optimizer& optimizer,
                                       const std::vector<torch::Tensor>& params) {
  std::vector<torch::Tensor> found;
  for (const torch::Tensor& param : params) found.push_back(state_of(optimizer, param).ema_param());
  return found;
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

TYPED_TEST(Ema, ParametersHoldThemAndGetTheirValuesBack) {
  for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
    const auto params = make_params(dtype);
    typename TypeParam::Optimizer optimizer(
        params, averages<typename TypeParam::Options>().master_weights(dtype == torch::kBFloat16));
    run_steps(optimizer, params, 0, 3);
    const auto values = copy_of(params);
    const auto before = copy_of(averages_in(optimizer, params));
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
  const auto swapped = copy_of(params);
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

TEST(EmaOptions, AreRefusedOutOfTheirRangeAndHoldForAllGroups) {
  for (const double decay : {1.0, -0.1, std::nan("")}) {
    expect_error([&] { FusedAdam(make_params(), FusedAdamOptions().ema_decay(decay)); },
                 "FusedAdam: expected defaults.ema_decay to be none, or at least 0 and less than "
                 "1, got ");
  }
  expect_error([&] { FusedAdam(make_params(), FusedAdamOptions().ema_start_step(-1)); },
               "FusedAdam: expected defaults.ema_start_step to be at least 0, got -1");
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(make_params());
  groups.emplace_back(make_params(), std::make_unique<FusedAdamOptions>());
  expect_error([&] { FusedAdam(groups, FusedAdamOptions().ema_decay(0.5)); },
               "expected param_groups[1].ema_decay to equal the optimizer's own");
}

TEST(SwapEma, WhatDoesNotFitOrCannotBeWrittenIsRefusedBeforeItWrites) {
  const auto inference = [] {
    const c10::InferenceMode guard;
    return torch::zeros({2});
  }();
  const auto half = torch::ones({2}, torch::kHalf);
  const auto zeros = torch::zeros({2});
  const auto refused = [](const torch::Tensor& param, const torch::Tensor& ema,
                          const std::string& text, const torch::Tensor& kept = {}) {
    const auto param_before = param.clone();
    const auto ema_before = ema.clone();
    expect_error([&] { swap_ema_(param, ema, kept); }, "swap_ema_: expected " + text);
    EXPECT_TRUE(torch::equal(param, param_before));
    EXPECT_TRUE(torch::equal(ema, ema_before));
  };
  refused(half, torch::zeros({2}, torch::kHalf),
          "ema to be of dtype Float for a Half parameter, got Half");
  refused(half, torch::zeros({3}), "ema to have");
  refused(torch::ones({2}, torch::kLong), zeros, "param to be a floating-point tensor, got Long");
  refused(half, zeros,
          "param to be of dtype BFloat16, as before the swap, got Half. Convert it "
          "back first.",
          torch::zeros({2}, torch::kBFloat16));
  refused(torch::ones({2}), inference,
          "ema to be a tensor that can be written, got one made in inference mode. Create or "
          "clone the tensor outside inference mode.");
  refused(torch::ones({2}), torch::zeros({1}).expand({2}),
          "ema to have memory for each of its elements");
  refused(inference, zeros, "param to be a tensor that");
  refused(torch::ones({1}).expand({2}), zeros, "param to have memory for each of its elements");
  // A parameter of 16 bits leaves its average as it is.
  swap_ema_(half, inference);
  EXPECT_TRUE(torch::equal(half, torch::zeros({2}, torch::kHalf)));
}

/// An optimizer that has averages of its parameters.
struct Averaged {
  explicit Averaged(torch::ScalarType dtype = torch::kFloat)
      : params(make_params(dtype)),
        optimizer(std::make_unique<FusedAdam>(
            params, FusedAdamOptions(0.1).ema_decay(0.5).master_weights(dtype != torch::kFloat))) {
    run_steps(*optimizer, params, 0, 2);
    values = copy_of(params);
    before = copy_of(averages());
  }
  std::vector<torch::Tensor> averages() const { return averages_in(*optimizer, params); }
  void expect_restored() const {
    expect_equal(params, values);
    expect_equal(averages(), before);
  }
  void convert(torch::ScalarType dtype) const {
    for (const torch::Tensor& param : params) param.set_data(param.detach().to(dtype));
  }

  std::vector<torch::Tensor> params;
  std::unique_ptr<FusedAdam> optimizer;
  std::vector<torch::Tensor> values;
  std::vector<torch::Tensor> before;
};

TEST(EmaWeights, NeedAverages) {
  const auto params = make_params();
  FusedAdam optimizer(params);
  run_steps(optimizer, params, 0, 1);
  EXPECT_FALSE(averages_in(optimizer, params)[0].defined());
  expect_error([&] { optimizer.swap_ema_(); },
               "FusedAdam::swap_ema_: expected ema_decay to be a number, got none");
}

TEST(EmaWeights, StatesThatWereLoadedInInferenceModeCanBeExchanged) {
  const Averaged from;
  const std::string archive = saved(*from.optimizer);
  for (const bool by_archive : {false, true}) {
    const Averaged to;
    {
      const c10::InferenceMode guard;
      if (by_archive) {
        load(*to.optimizer, archive);
      } else {
        to.optimizer->load_state_dict(from.optimizer->state_dict());
      }
    }
    EXPECT_FALSE(state_of(*to.optimizer, to.params[0]).step().is_inference());
    {
      const EmaWeights weights(*to.optimizer);
    }
    to.expect_restored();
    run_steps(*to.optimizer, to.params, 2, 3);
  }
}

TEST(EmaWeights, AnExchangeBackGoesOnAfterAnError) {
  const Averaged run;
  run.optimizer->swap_ema_();
  const torch::Tensor own = run.params[1].detach();
  run.params[1].set_data(torch::zeros({2}));
  expect_error([&] { run.optimizer->swap_ema_(); }, "swap_ema_: expected ema to have");
  expect_error([&] { run.optimizer->step(); }, "to hold their own values, got their averages");
  run.params[1].set_data(own);
  run.optimizer->swap_ema_();
  run.expect_restored();
}

TEST(EmaWeights, MastersAreNotRemadeOfAverages) {
  const Averaged run(torch::kBFloat16);
  const torch::Tensor master = state_of(*run.optimizer, run.params[0]).master_param();
  const torch::Tensor before = master.clone();
  {
    const EmaWeights weights(*run.optimizer);
    expect_error([&] { run.optimizer->remake_masters(); },
                 "FusedAdam::remake_masters: expected the parameters to hold their own values");
  }
  EXPECT_TRUE(torch::equal(master, before));
  run.expect_restored();
}

TEST(EmaWeights, ParametersOfOneMemoryAreRestored) {
  for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
    const torch::Tensor memory = torch::arange(1.0, 4.0).to(dtype);
    const std::vector<torch::Tensor> params{memory.detach().requires_grad_(),
                                            memory.clone().requires_grad_()};
    FusedSGD optimizer(params, FusedSGDOptions(0.5).ema_decay(0.5));
    run_steps(optimizer, params, 0, 1);
    params[1].set_data(memory);  // a step would refuse it
    const torch::Tensor value = memory.clone();
    {
      const EmaWeights weights(optimizer);
    }
    EXPECT_TRUE(torch::equal(memory, value));
    // The last exchange fails: those before it are taken back.
    state_of(optimizer, params[1]).ema_param(torch::zeros({2}));
    expect_error([&] { optimizer.swap_ema_(); }, "swap_ema_: expected ema to have");
    EXPECT_TRUE(torch::equal(memory, value));
  }
}

TEST(EmaWeights, AConvertedModelKeepsItsValuesAndIsReported) {
  using Pair = std::pair<torch::ScalarType, torch::ScalarType>;
  for (const auto& [dtype, other] :
       {Pair{torch::kFloat, torch::kHalf}, Pair{torch::kFloat, torch::kDouble},
        Pair{torch::kBFloat16, torch::kHalf}, Pair{torch::kBFloat16, torch::kFloat}}) {
    const Averaged run(dtype);
    Warnings warnings;
    {
      const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
      const EmaWeights weights(*run.optimizer);
      run.convert(other);
    }
    ASSERT_EQ(warnings.texts.size(), 1U);
    EXPECT_NE(warnings.texts[0].find("could not restore the parameters from their averages"),
              std::string::npos);
    EXPECT_NE(warnings.texts[0].find("Convert the model back, then call swap_ema_()."),
              std::string::npos);
    expect_error([&] { run.optimizer->step(); }, "to hold their own values, got their averages");
    expect_error([&] { run.optimizer->swap_ema_(); },
                 "FusedAdam::swap_ema_: expected a parameter of dtype ");
    run.convert(dtype);
    run.optimizer->swap_ema_();
    expect_equal(run.params, run.values);
  }
}

TEST(EmaWeights, WarnOfParametersThatWereWritten) {
  Averaged averaged;
  Warnings warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  {
    const EmaWeights weights(*averaged.optimizer);
  }
  averaged.expect_restored();
  EXPECT_TRUE(warnings.texts.empty());
  {
    const EmaWeights weights(*averaged.optimizer);
    const torch::NoGradGuard no_grad;
    averaged.params[1].fill_(3.0);
  }
  expect_equal(averaged.params, averaged.values);
  EXPECT_TRUE(torch::equal(averaged.averages()[1], torch::full_like(averaged.averages()[1], 3.0)));
  ASSERT_EQ(warnings.texts.size(), 1U);
  EXPECT_NE(warnings.texts[0].find("FusedAdam::swap_ema_: parameters were written while they held "
                                   "their averages."),
            std::string::npos);
}

TEST(EmaWeights, RestoreAlsoAfterTheOptimizerHasMovedOrEnded) {
  Averaged run;
  {
    const EmaWeights weights(*run.optimizer);
    auto moved = std::make_unique<FusedAdam>(std::move(*run.optimizer));
    run.optimizer = std::move(moved);
  }
  run.expect_restored();
  run_steps(*run.optimizer, run.params, 2, 3);
  run.values = copy_of(run.params);
  {
    const EmaWeights weights(*run.optimizer);
    run.optimizer.reset();
  }
  expect_equal(run.params, run.values);
}

}  // namespace
}  // namespace torchfuse::optim
