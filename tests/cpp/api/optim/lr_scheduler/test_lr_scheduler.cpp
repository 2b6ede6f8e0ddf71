// SPDX-License-Identifier: BSD-3-Clause
// What all schedulers share: the first step, base rates, edits between steps, skipped steps.
#include <torchfuse/amp/grad_scaler.h>
#include <torchfuse/optim/fused_adam.h>
#include <torchfuse/optim/fused_sgd.h>
#include <torchfuse/optim/lr_scheduler/cosine_annealing_lr.h>
#include <torchfuse/optim/lr_scheduler/lambda_lr.h>
#include <torchfuse/optim/lr_scheduler/linear_lr.h>
#include <torchfuse/optim/lr_scheduler/step_lr.h>

#include <cmath>
#include <limits>

#include "scheduler_testing.h"

namespace torchfuse::testing {
namespace {

using amp::GradScaler;
using amp::GradScalerOptions;
using optim::ExponentialLR;
using optim::FusedSGD;
using optim::FusedSGDOptions;
using optim::LambdaLR;
using optim::LinearLR;
using optim::LRScheduler;
using optim::StepLR;

/// A scheduler of a program: half of the rate in every epoch.
class Halving : public LRScheduler {
 public:
  explicit Halving(torch::optim::Optimizer& optimizer) : LRScheduler("Halving", optimizer) {
    initial_step();
  }

 protected:
  std::vector<double> get_lr(std::int64_t epoch) const override {
    std::vector<double> rates = base_lrs_;
    for (double& rate : rates) rate *= std::pow(0.5, epoch);
    return rates;
  }
};

TEST(LRScheduler, TheConstructorSetsEpochZero) {
  auto optimizer = two_groups();
  const LinearLR scheduler(optimizer, 0.1);
  EXPECT_EQ(scheduler.last_epoch(), 0);
  expect_rates(rates_of(optimizer), {0.05, 0.002});
  EXPECT_EQ(scheduler.base_lrs(), base_rates());
  EXPECT_EQ(scheduler.get_last_lr(), rates_of(optimizer));
}

TEST(LRScheduler, GoesOnAfterALastEpoch) {
  auto optimizer = two_groups();
  const LambdaLR scheduler(
      optimizer, [](std::int64_t epoch) { return 1.0 / static_cast<double>(epoch + 1); }, 98);
  EXPECT_EQ(scheduler.last_epoch(), 99);
  expect_rates(rates_of(optimizer), {0.005, 0.0002});
}

TEST(LRScheduler, EditsOfARateCarryOver) {
  auto optimizer = two_groups();
  ExponentialLR scheduler(optimizer, 0.5);
  optimizer.param_groups()[0].options().set_lr(8.0);
  scheduler.step();
  EXPECT_EQ(rates_of(optimizer), (Rates{4.0, 0.01}));
}

TEST(LRScheduler, SchedulersOfOneOptimizerShareBaseRates) {
  auto optimizer = two_groups();
  {
    const LinearLR first(optimizer, 0.1);
    const optim::CosineAnnealingLR second(optimizer, 10);
    EXPECT_EQ(second.base_lrs(), base_rates());
  }
  const ExponentialLR later(optimizer, 0.5);
  expect_rates(later.base_lrs(), {0.05, 0.002});
}

TEST(LRScheduler, OptimizersDoNotShareBaseRates) {
  auto first = two_groups();
  const LinearLR warmup(first, 0.1);
  auto second = two_groups(Rates{3.0, 4.0});
  EXPECT_EQ(LinearLR(second, 0.1).base_lrs(), (Rates{3.0, 4.0}));
}

TEST(LRScheduler, WorksWithOptimizersOfBothLibraries) {
  auto fused = two_groups<optim::FusedAdam, optim::FusedAdamOptions>();
  StepLR of_fused(fused, 1, 0.5);
  of_fused.step();
  auto adam = two_groups<torch::optim::Adam, torch::optim::AdamOptions>();
  StepLR of_torch(adam, 1, 0.5);
  of_torch.step();
  EXPECT_EQ(rates_of(fused), (Rates{0.25, 0.01}));
  EXPECT_EQ(rates_of(adam), (Rates{0.25, 0.01}));
}

TEST(LRScheduler, AProgramCanAddAClass) {
  auto optimizer = two_groups();
  expect_resumes([](auto& of) { return std::make_shared<Halving>(of); }, 3, 3);
  Halving scheduler(optimizer);
  scheduler.step();
  EXPECT_EQ(rates_of(optimizer), (Rates{0.25, 0.01}));
}

TEST(LRScheduler, RefusesGroupsThatWereAddedLater) {
  auto optimizer = two_groups();
  StepLR scheduler(optimizer, 1);
  optimizer.add_param_group(
      torch::optim::OptimizerParamGroup({torch::ones({1}).requires_grad_(true)}));
  const Rates before = rates_of(optimizer);
  expect_error([&] { scheduler.step(); },
               "StepLR: expected the optimizer to have 2 parameter groups, as when the scheduler "
               "was made, got 3. Make a new scheduler after add_param_group().");
  EXPECT_EQ(rates_of(optimizer), before);
  EXPECT_EQ(scheduler.last_epoch(), 0);
}

TEST(LRScheduler, RefusesAFunctionThatGivesNoNumber) {
  auto optimizer = two_groups();
  LambdaLR scheduler(optimizer, [](std::int64_t epoch) {
    return epoch == 0 ? 1.0 : std::numeric_limits<double>::quiet_NaN();
  });
  expect_error([&] { scheduler.step(); },
               "LambdaLR: expected the rate of group 0 in epoch 1 to be finite, got nan.");
  EXPECT_EQ(rates_of(optimizer), base_rates());
  EXPECT_EQ(scheduler.last_epoch(), 0);
}

// --- Skipped steps -------------------------------------------------------------------------------

void set_gradients(torch::optim::Optimizer& optimizer, float value) {
  for (auto& group : optimizer.param_groups()) {
    for (torch::Tensor& param : group.params()) {
      param.mutable_grad() = torch::full_like(param, value);
    }
  }
}

constexpr float kOverflow = std::numeric_limits<float>::infinity();

TEST(LRScheduler, StepIfAppliedFollowsAFusedOptimizer) {
  auto optimizer = two_groups<FusedSGD, FusedSGDOptions>();
  for (auto& group : optimizer.param_groups()) {
    static_cast<FusedSGDOptions&>(group.options()).skip_non_finite(true);
  }
  static_cast<FusedSGDOptions&>(optimizer.defaults()).skip_non_finite(true);
  StepLR scheduler(optimizer, 1, 0.5);
  EXPECT_FALSE(scheduler.step_if_applied());  // there was no step yet
  set_gradients(optimizer, kOverflow);
  optimizer.step();
  EXPECT_FALSE(scheduler.step_if_applied());
  EXPECT_EQ(scheduler.last_epoch(), 0);
  set_gradients(optimizer, 1.0F);
  optimizer.step();
  EXPECT_TRUE(scheduler.step_if_applied());
  EXPECT_EQ(scheduler.last_epoch(), 1);
}

TEST(LRScheduler, StepIfAppliedTellsOptimizersOfOneScalerApart) {
  auto fused = two_groups<FusedSGD, FusedSGDOptions>();
  auto of_torch = two_groups();
  StepLR of_fused(fused, 1, 0.5);
  StepLR of_other(of_torch, 1, 0.5);
  GradScaler scaler(torch::kCPU, GradScalerOptions().init_scale(1.0));
  scaler.scale(torch::zeros({}));
  const auto iterate = [&](float fused_value, float other_value) {
    set_gradients(fused, fused_value);
    set_gradients(of_torch, other_value);
    scaler.step(fused);
    scaler.step(of_torch);
    scaler.update();
    const bool first = of_fused.step_if_applied(scaler);
    return std::make_pair(first, of_other.step_if_applied(scaler));
  };
  EXPECT_EQ(iterate(1.0F, kOverflow), std::make_pair(true, false));
  EXPECT_EQ(iterate(kOverflow, 1.0F), std::make_pair(false, true));
  EXPECT_EQ(iterate(1.0F, 1.0F), std::make_pair(true, true));
  EXPECT_EQ(of_fused.last_epoch(), 2);
  EXPECT_EQ(of_other.last_epoch(), 2);
}

TEST(LRScheduler, StepIfAppliedKnowsOnlySteppedOptimizers) {
  auto optimizer = two_groups();
  StepLR scheduler(optimizer, 1);
  expect_error([&] { scheduler.step_if_applied(); },
               "StepLR.step_if_applied: expected an optimizer of torchfuse, which knows whether "
               "its last step was skipped, got another one. Pass the scaler that steps it.");
  const GradScaler scaler(torch::kCPU);
  EXPECT_FALSE(scheduler.step_if_applied(scaler));
  const GradScaler disabled(torch::kCPU, GradScalerOptions().enabled(false));
  EXPECT_TRUE(scheduler.step_if_applied(disabled));
}

/// Rounding grows with the number of steps, and relative to eta_min.
TEST(CosineAnnealingLR, RisesFromZeroAndReturns) {
  for (const std::int64_t t_max : {10, 100, 1000, 10'000}) {
    auto optimizer = two_groups<FusedAdam, FusedAdamOptions>(Rates{0.5, 0.0});
    CosineAnnealingLR scheduler(optimizer, t_max, 1e-3);
    for (std::int64_t i = 0; i < 2 * t_max; ++i) scheduler.step();
    EXPECT_EQ(scheduler.last_epoch(), 2 * t_max);
    EXPECT_NEAR(rates_of(optimizer)[1], 0.0, 1e-9);
  }
}

}  // namespace
}  // namespace torchfuse::testing
