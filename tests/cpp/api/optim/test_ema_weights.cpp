// SPDX-License-Identifier: BSD-3-Clause
// Averages in the parameters' place: whatever happens in between, the parameters get their values
// back, or the optimizer says that they did not.
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/optim/fused_adam.h>
#include <torchfuse/optim/fused_sgd.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "optim_testing.h"

namespace torchfuse::optim {
namespace {

using testing::expect_equal;
using testing::expect_error;
using testing::load;
using testing::make_params;
using testing::run_steps;
using testing::saved;
using testing::state_of;
using testing::Warnings;

std::vector<torch::Tensor> clones(const std::vector<torch::Tensor>& tensors) {
  std::vector<torch::Tensor> copies;
  for (const torch::Tensor& tensor : tensors) copies.push_back(tensor.detach().clone());
  return copies;
}

/// An optimizer that has averages of its parameters.
struct Averaged {
  explicit Averaged(torch::ScalarType dtype = torch::kFloat)
      : params(make_params(dtype)),
        optimizer(std::make_unique<FusedAdam>(
            params, FusedAdamOptions(0.1).ema_decay(0.5).master_weights(dtype != torch::kFloat))) {
    run_steps(*optimizer, params, 0, 2);
    values = clones(params);
    before = clones(averages());
  }
  std::vector<torch::Tensor> averages() const {
    std::vector<torch::Tensor> found;
    for (const torch::Tensor& param : params) {
      found.push_back(state_of(*optimizer, param).ema_param());
    }
    return found;
  }
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
  FusedAdam optimizer(make_params());
  expect_error([&] { optimizer.swap_ema_(); },
               "FusedAdam::swap_ema_: expected ema_decay to be a number, got none");
}

TEST(EmaWeights, AreRestoredAfterAnError) {
  const auto params = make_params();
  FusedAdam optimizer(params, FusedAdamOptions(0.1).ema_decay(0.5));
  run_steps(optimizer, params, 0, 2);
  const auto values = values_of(params);
  state_of(optimizer, params[3]).ema_param(torch::zeros({2}));
  expect_error([&] { optimizer.swap_ema_(); }, "swap_ema_: expected ema to have");
  expect_equal(params, values);
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
    EXPECT_NE(warnings.texts[0].find("left averages in the parameters' place"), std::string::npos);
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
  run.values = clones(run.params);
  {
    const EmaWeights weights(*run.optimizer);
    run.optimizer.reset();
  }
  expect_equal(run.params, run.values);
}

}  // namespace
}  // namespace torchfuse::optim
