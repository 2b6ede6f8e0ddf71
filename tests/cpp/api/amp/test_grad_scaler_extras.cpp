// SPDX-License-Identifier: BSD-3-Clause
// What the scaler does beyond torch.amp.GradScaler, all of it off by default.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/amp/grad_scaler.h>
#include <torchfuse/optim/fused_adam.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "../optim/optim_testing.h"
#include "amp_testing.h"

namespace torchfuse::testing {
namespace {

using amp::GradScaler;
using amp::GradScalerOptions;
using optim::FusedAdam;
using optim::FusedAdamOptions;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

using MakeOptimizer =
    std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<torch::Tensor>)>;

const MakeOptimizer kFusedAdam = [](std::vector<torch::Tensor> params) {
  return std::make_unique<FusedAdam>(std::move(params), FusedAdamOptions(0.1));
};
const MakeOptimizer kSgd = [](std::vector<torch::Tensor> params) {
  return std::make_unique<torch::optim::SGD>(std::move(params), torch::optim::SGDOptions(0.1));
};

/// One iteration; whether the parameters stayed as they were.
bool iterate(GradScaler& scaler, torch::optim::Optimizer& optimizer, bool overflow,
             bool unscale = false) {
  const auto& params = optimizer.param_groups()[0].params();
  scaler.scale(torch::zeros({}));
  set_grads(params, 1);
  if (overflow) params.back().mutable_grad().view(-1)[-1] = kInf;
  const auto before = copies(params);
  if (unscale) scaler.unscale_(optimizer);
  scaler.step(optimizer);
  scaler.update();
  return torch::equal(before[0], params[0]);
}

TEST(GradScalerExtras, TheScaleStaysBetweenItsBounds) {
  FusedAdam optimizer(make_params());
  GradScaler scaler(
      torch::kCPU,
      GradScalerOptions().init_scale(8.0).growth_interval(1).min_scale(3.0).max_scale(20.0));
  std::vector<double> scales;
  for (const bool overflow : {true, true, true, false, false, false, false}) {
    iterate(scaler, optimizer, overflow);
    scales.push_back(scaler.get_scale());
  }
  EXPECT_EQ(scales, (std::vector<double>{4, 3, 3, 6, 12, 20, 20}));
}

TEST(GradScalerExtras, AStaticScaleStaysAndStillSkips) {
  for (const MakeOptimizer& make : {kFusedAdam, kSgd}) {
    for (const bool unscale : {false, true}) {
      const auto optimizer = make(make_params());
      GradScaler scaler(torch::kCPU,
                        GradScalerOptions().init_scale(8.0).growth_interval(1).dynamic(false));
      for (const bool overflow : {false, true, false, true}) {
        EXPECT_EQ(iterate(scaler, *optimizer, overflow, unscale), overflow);
      }
      EXPECT_EQ(scaler.get_scale(), 8.0);
    }
  }
}

TEST(GradScalerExtras, SkipsAreCounted) {
  for (const MakeOptimizer& make : {kFusedAdam, kSgd}) {
    const auto optimizer = make(make_params());
    GradScaler scaler = make_scaler();
    EXPECT_FALSE(scaler.step_counts().defined());
    EXPECT_FALSE(scaler.last_step_skipped());
    for (const bool overflow : {false, true, true, false}) {
      iterate(scaler, *optimizer, overflow);
      EXPECT_EQ(scaler.last_step_skipped(), overflow);
    }
    EXPECT_EQ(scaler.skipped_steps(), 2);
    EXPECT_TRUE(torch::equal(scaler.step_counts(), torch::tensor({4, 2, 0}, torch::kLong)));
  }
}

TEST(GradScalerExtras, HistoryIsARingOfTheLastIterations) {
  FusedAdam optimizer(make_params());
  GradScaler scaler(torch::kCPU,
                    GradScalerOptions().init_scale(8.0).growth_interval(2).history_size(3));
  EXPECT_TRUE(scaler.scale_history().empty());
  for (const bool overflow : {false, true, false, false}) iterate(scaler, optimizer, overflow);
  const auto history = scaler.scale_history();
  ASSERT_EQ(history.size(), 3U);
  const std::vector<double> scales = {8, 4, 4};
  for (std::size_t i = 0; i < history.size(); ++i) {
    EXPECT_EQ(history[i].step, static_cast<std::int64_t>(i) + 1);
    EXPECT_EQ(history[i].scale, scales[i]);
    EXPECT_EQ(history[i].skipped, i == 0);
  }
}

TEST(GradScalerExtras, ANewScaleCountsTheIterationToo) {
  FusedAdam optimizer(make_params());
  GradScaler scaler(torch::kCPU, GradScalerOptions().init_scale(8.0).history_size(4));
  scaler.scale(torch::zeros({}));
  set_grads(optimizer.param_groups()[0].params(), 1);
  optimizer.param_groups()[0].params()[0].mutable_grad().view(-1)[0] = kInf;
  scaler.step(optimizer);
  scaler.update(4.0);
  EXPECT_EQ(scaler.get_scale(), 4.0);
  EXPECT_EQ(scaler.skipped_steps(), 1);
  EXPECT_EQ(scaler.scale_history().at(0).scale, 8.0);
  scaler.update(2.0);
  EXPECT_EQ(scaler.scale_history().size(), 1U) << "nothing was checked since";
}

TEST(GradScalerExtras, Fp16GradientsOnRequest) {
  const auto param =
      torch::ones({3}, torch::TensorOptions().dtype(torch::kHalf)).set_requires_grad(true);
  torch::optim::SGD optimizer({param}, torch::optim::SGDOptions(0.1));
  GradScaler scaler(torch::kCPU, GradScalerOptions().init_scale(4.0).allow_fp16_grads(true));
  scaler.scale(torch::zeros({}));
  param.mutable_grad() = torch::full({3}, 4.0, torch::kHalf);
  scaler.unscale_(optimizer);
  EXPECT_TRUE(torch::equal(param.grad(), torch::ones({3}, torch::kHalf)));
}

TEST(GradScalerExtras, NoGradientsAtAllOnRequest) {
  for (const MakeOptimizer& make : {kFusedAdam, kSgd}) {
    for (const bool unscale : {false, true}) {
      const auto optimizer = make(make_params());
      GradScaler scaler(
          torch::kCPU, GradScalerOptions().init_scale(8.0).growth_interval(1).allow_no_grads(true));
      scaler.scale(torch::zeros({}));
      if (unscale) scaler.unscale_(*optimizer);
      scaler.step(*optimizer);
      expect_error([&] { scaler.step(*optimizer); },
                   "step() has already been called since the last update().");
      scaler.update();
      EXPECT_EQ(scaler.get_scale(), 8.0);
      EXPECT_FALSE(iterate(scaler, *optimizer, false));
      EXPECT_EQ(scaler.get_scale(), 16.0);
    }
  }
}

TEST(GradScalerExtras, RefusesNumbersOutOfRange) {
  const auto refuses = [](const GradScalerOptions& options, const std::string& message) {
    expect_error([&] { GradScaler(torch::kCPU, options); }, "GradScaler: expected " + message);
  };
  refuses(GradScalerOptions().init_scale(kNaN), "init_scale to be positive and finite, got nan");
  refuses(GradScalerOptions().init_scale(0.0), "init_scale to be positive and finite, got 0");
  refuses(GradScalerOptions().init_scale(0x1p127),
          "init_scale to be from 2^-126 to 2^126, so that");
  refuses(GradScalerOptions().init_scale(1e300), "init_scale to be from 2^-126 to 2^126, so that");
  refuses(GradScalerOptions().init_scale(1e-50), "init_scale to be from 2^-126 to 2^126, so that");
  refuses(GradScalerOptions().min_scale(0x1p127), "min_scale to be at most 2^126, got 1.70");
  refuses(GradScalerOptions().min_scale(2.0).max_scale(1.0),
          "0 <= min_scale <= max_scale within fp32, got min_scale 2 and max_scale 1");
  refuses(GradScalerOptions().min_scale(kNaN), "0 <= min_scale <= max_scale within fp32");
  refuses(GradScalerOptions().max_scale(1e39), "0 <= min_scale <= max_scale within fp32");
  refuses(GradScalerOptions().history_size(-1), "history_size to be a number of updates, got -1.");
  GradScaler scaler = started_scaler();
  expect_error([&] { scaler.update(kNaN); },
               "GradScaler: expected new_scale to be positive and finite, got nan.");
  expect_error([&] { scaler.update(-1.0); }, "new_scale to be positive and finite, got -1.");
  expect_error([&] { scaler.update(0x1p127); }, "new_scale to be from 2^-126 to 2^126, so that");
  EXPECT_EQ(scaler.get_scale(), 16.0);
}

TEST(GradScalerExtras, BringsATooLargeScaleOfTorchDown) {
  GradScaler scaler = started_scaler();
  amp::GradScalerState state = *scaler.state_dict();
  state.scale = 0x1p127;
  testing::Warnings warnings;
  {
    const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    scaler.load_state_dict(state);
  }
  ASSERT_EQ(warnings.texts.size(), 1u);
  EXPECT_NE(warnings.texts[0].find("the state's scale is 1.70141e+38, and becomes 2^126"),
            std::string::npos)
      << warnings.texts[0];
  EXPECT_EQ(scaler.get_scale(), 0x1p126);
  state.scale = 1e300;
  expect_error([&] { scaler.load_state_dict(state); }, "the state's scale to be from 2^-126 to");
  EXPECT_EQ(scaler.get_scale(), 0x1p126);
}

TEST(GradScalerExtras, AnUnknownProcessGroupIsNamed) {
  FusedAdam optimizer(make_params());
  GradScaler scaler(torch::kCPU, GradScalerOptions().process_group("no such group"));
  scaler.scale(torch::zeros({}));
  set_grads(optimizer.param_groups()[0].params(), 1);
  expect_error([&] { scaler.step(optimizer); }, "no such group");
}

}  // namespace
}  // namespace torchfuse::testing
