// SPDX-License-Identifier: BSD-3-Clause
// Arguments out of range are refused by name, and the rates stay as they were.
#include <torchfuse/optim/fused_adam.h>
#include <torchfuse/optim/lr_scheduler/cosine_annealing_lr.h>
#include <torchfuse/optim/lr_scheduler/cyclic_lr.h>
#include <torchfuse/optim/lr_scheduler/lambda_lr.h>
#include <torchfuse/optim/lr_scheduler/linear_lr.h>
#include <torchfuse/optim/lr_scheduler/one_cycle_lr.h>
#include <torchfuse/optim/lr_scheduler/reduce_lr_on_plateau.h>
#include <torchfuse/optim/lr_scheduler/step_lr.h>

#include <cmath>
#include <limits>

#include "scheduler_testing.h"

namespace torchfuse::testing {
namespace {

using namespace optim;  // NOLINT(google-build-using-namespace): all schedulers

const double kNaN = std::numeric_limits<double>::quiet_NaN();

template <class Class, class... Arguments>
void refuses(const std::string& text, const Arguments&... arguments) {
  auto optimizer = two_groups();
  expect_error([&] { Class(optimizer, arguments...); }, text);
  EXPECT_EQ(rates_of(optimizer), base_rates());
}

TEST(LRSchedulerBadInput, Decays) {
  refuses<StepLR>("StepLR: expected step_size to be at least 1, got 0.", 0);
  refuses<StepLR>("StepLR: expected gamma to be finite and at least 0, got nan.", 1, kNaN);
  refuses<StepLR>("StepLR: expected gamma to be finite and at least 0, got -0.5.", 1, -0.5);
  refuses<StepLR>("StepLR: expected last_epoch to be at least 0, or -1 for a new run, got -2.", 1,
                  0.1, -2);
  using Milestones = std::vector<std::int64_t>;
  refuses<MultiStepLR>(
      "MultiStepLR: expected milestones to be at least 0 and not decreasing, got 3 after 5. Sort "
      "them.",
      Milestones{5, 3});
  refuses<MultiStepLR>("MultiStepLR: expected milestones to be at least 0", Milestones{-1});
  refuses<ExponentialLR>("ExponentialLR: expected gamma to be finite and at least 0, got inf.",
                         std::numeric_limits<double>::infinity());
}

TEST(LRSchedulerBadInput, Lines) {
  refuses<ConstantLR>("ConstantLR: expected factor to be greater than 0 and at most 1, got 0.",
                      0.0);
  refuses<ConstantLR>("ConstantLR: expected total_iters to be at least 1, got 0.", 0.5, 0);
  refuses<LinearLR>("LinearLR: expected start_factor to be greater than 0 and at most 1, got 0.",
                    0.0);
  refuses<LinearLR>("LinearLR: expected end_factor to be from 0 to 1, got 2.", 0.5, 2.0);
  refuses<LinearLR>("LinearLR: expected total_iters to be at least 1, got -3.", 0.5, 1.0, -3);
  refuses<PolynomialLR>("PolynomialLR: expected total_iters to be at least 1, got 0.", 0);
  refuses<PolynomialLR>("PolynomialLR: expected power to be finite and at least 0, got nan.", 5,
                        kNaN);
}

TEST(LRSchedulerBadInput, Cosines) {
  refuses<CosineAnnealingLR>("CosineAnnealingLR: expected T_max to be at least 1, got 0.", 0);
  refuses<CosineAnnealingLR>(
      "CosineAnnealingLR: expected eta_min to be finite and at least 0, got -1.", 5, -1.0);
  refuses<CosineAnnealingWarmRestarts>(
      "CosineAnnealingWarmRestarts: expected T_0 to be at least 1, got 0.", 0);
  refuses<CosineAnnealingWarmRestarts>(
      "CosineAnnealingWarmRestarts: expected T_mult to be at least 1, got 0.", 5, 0);
  auto optimizer = two_groups();
  CosineAnnealingWarmRestarts scheduler(optimizer, 5);
  expect_error([&] { scheduler.step(kNaN); },
               "CosineAnnealingWarmRestarts.step: expected epoch to be finite and at least 0, got "
               "nan.");
}

TEST(LRSchedulerBadInput, Cycles) {
  const CyclicLROptions cycle(0.1, 0.5);
  refuses<CyclicLR>("CyclicLR: expected base_lr of group 1 to be finite and at least 0, got -1.",
                    CyclicLROptions(std::vector<double>{0.1, -1.0}, 0.5));
  refuses<CyclicLR>(
      "CyclicLR: expected max_lr to be one number or one for each of the 2 parameter groups, got "
      "3.",
      CyclicLROptions(0.1, std::vector<double>{1.0, 2.0, 3.0}));
  refuses<CyclicLR>("CyclicLR: expected step_size_up to be at least 1, got 0.",
                    CyclicLROptions(cycle).step_size_up(0));
  refuses<CyclicLR>(
      "CyclicLR: expected mode to be one of triangular, triangular2, exp_range, got square.",
      CyclicLROptions(cycle).mode("square"));
  refuses<CyclicLR>(
      "CyclicLR: expected max_momentum of group 0 to be at least 0 and less than 1, got 1.",
      CyclicLROptions(cycle).max_momentum(1.0));
  refuses<OneCycleLR>(
      "OneCycleLR: expected total_steps, or both epochs and steps_per_epoch, got neither.",
      OneCycleLROptions(0.1).epochs(3));
  refuses<OneCycleLR>("OneCycleLR: expected total_steps to be at least 1, got 0.",
                      OneCycleLROptions(0.1).total_steps(0));
  refuses<OneCycleLR>("OneCycleLR: expected pct_start to be from 0 to 1, got 1.5.",
                      OneCycleLROptions(0.1).total_steps(9).pct_start(1.5));
  refuses<OneCycleLR>("OneCycleLR: expected pct_start * total_steps not to be 1, got 0.5 * 2",
                      OneCycleLROptions(0.1).total_steps(2).pct_start(0.5));
  refuses<OneCycleLR>("OneCycleLR: expected anneal_strategy to be one of cos, linear, got sine.",
                      OneCycleLROptions(0.1).total_steps(9).anneal_strategy("sine"));
  refuses<OneCycleLR>("OneCycleLR: expected div_factor to be finite and greater than 0, got 0.",
                      OneCycleLROptions(0.1).total_steps(9).div_factor(0.0));
  refuses<CyclicLR>("CyclicLR: expected the rate of group 0 in epoch 0 to be finite, got nan.",
                    CyclicLROptions(cycle).scale_fn([](double) { return kNaN; }));
}

TEST(LRSchedulerBadInput, Plateaus) {
  using Options = ReduceLROnPlateauOptions;
  refuses<ReduceLROnPlateau>(
      "ReduceLROnPlateau: expected factor to be at least 0 and less than 1, got 1.",
      Options().factor(1.0));
  refuses<ReduceLROnPlateau>("ReduceLROnPlateau: expected patience to be at least 0, got -1.",
                             Options().patience(-1));
  refuses<ReduceLROnPlateau>("ReduceLROnPlateau: expected mode to be one of min, max, got less.",
                             Options().mode("less"));
  refuses<ReduceLROnPlateau>(
      "ReduceLROnPlateau: expected threshold_mode to be one of rel, abs, got sum.",
      Options().threshold_mode("sum"));
  refuses<ReduceLROnPlateau>(
      "ReduceLROnPlateau: expected min_lr to be one number or one for each of the 2 parameter "
      "groups, got 1.",
      Options().min_lr(std::vector<double>{0.1}));
}

TEST(LRSchedulerBadInput, Functions) {
  using Functions = std::vector<LRLambdas::Function>;
  const auto one = [](std::int64_t) { return 1.0; };
  refuses<LambdaLR>(
      "LambdaLR: expected lr_lambda to be one function or one for each of the 2 parameter groups, "
      "got 1.",
      Functions{one});
  refuses<MultiplicativeLR>(
      "MultiplicativeLR: expected lr_lambda of group 1 to be a function, got an empty one.",
      Functions{one, nullptr});
}

/// The second group's rate is refused: the first one's must not have been set.
TEST(LRSchedulerBadInput, AStepIsAllOrNothing) {
  auto optimizer = two_groups<FusedAdam, FusedAdamOptions>();
  const auto half = [](std::int64_t epoch) { return epoch == 0 ? 1.0 : 0.5; };
  const auto negative = [](std::int64_t epoch) { return epoch == 0 ? 1.0 : -1.0; };
  LambdaLR scheduler(optimizer, std::vector<LRLambdas::Function>{half, negative});
  for (int attempt = 0; attempt < 2; ++attempt) {
    expect_error([&] { scheduler.step(); }, "to be at least 0");
    EXPECT_EQ(rates_of(optimizer), base_rates());
    EXPECT_EQ(scheduler.get_last_lr(), base_rates());
    EXPECT_EQ(scheduler.last_epoch(), 0);
  }
}

TEST(LRSchedulerBadInput, RatesOfTheOptimizer) {
  for (const double rate : {-0.1, kNaN}) {
    auto optimizer = two_groups(Rates{0.1, rate});
    expect_error([&] { StepLR(optimizer, 1); },
                 "StepLR: expected lr of group 1 to be finite and at least 0, got ");
  }
}

}  // namespace
}  // namespace torchfuse::testing
