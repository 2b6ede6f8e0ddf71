// SPDX-License-Identifier: BSD-3-Clause
// Rates and momenta where Python's own classes are no oracle: they are that of
// tests/python/checkpoint/test_cpp_schedulers.py, for every scheduler, at once and after a load.

#include <torchfuse/torchfuse.h>

#include <cmath>
#include <limits>
#include <numbers>
#include <tuple>

#include "scheduler_testing.h"

namespace torchfuse::testing {
namespace {

using namespace optim;  // NOLINT(google-build-using-namespace): all schedulers
TEST(LRSchedulerState, ASequenceOfAChainGoesOnWhereItWasSaved) {
  const auto make = [](torch::optim::Optimizer& optimizer) {
    using Parts = std::vector<std::shared_ptr<LRScheduler>>;
    auto chain =
        std::make_shared<ChainedScheduler>(Parts{std::make_shared<ConstantLR>(optimizer, 0.1, 4),
                                                 std::make_shared<ExponentialLR>(optimizer, 0.9)});
    return std::make_shared<SequentialLR>(
        optimizer, Parts{chain, std::make_shared<CosineAnnealingLR>(optimizer, 9)},
        std::vector<std::int64_t>{9});
  };
  for (const std::int64_t before : {7, 12}) expect_resumes(make, before, 14);
}

TEST(LRSchedulerFormulas, FunctionsOfEachGroup) {
  auto optimizer = two_groups();
  LambdaLR scheduler(optimizer, std::vector<LRLambdas::Function>{
                                    [](std::int64_t) { return 1.0; },
                                    [](std::int64_t epoch) { return std::pow(0.5, epoch); }});
  scheduler.step();
  scheduler.step();
  expect_rates(rates_of(optimizer), {0.5, 0.02 * 0.25});
}

/// Fused optimizers refuse a negative rate, so that rounding must not lead there.
TEST(LRSchedulerFormulas, ALineToZeroStaysAtZeroOrAbove) {
  for (std::int64_t steps = 1; steps < 200; ++steps) {
    auto optimizer = two_groups();
    LinearLR scheduler(optimizer, 1.0 / 3.0, 0.0, steps);
    for (std::int64_t i = 0; i < steps + 2; ++i) {
      scheduler.step();
      ASSERT_GE(scheduler.get_last_lr()[0], 0.0) << "step " << i << " of " << steps;
    }
    ASSERT_LE(scheduler.get_last_lr()[0], 1e-13);
  }
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

TEST(CosineAnnealingWarmRestarts, TakesPartsOfEpochs) {
  auto optimizer = two_groups();
  CosineAnnealingWarmRestarts scheduler(optimizer, 10, 2);
  scheduler.step(12.5);
  EXPECT_EQ(scheduler.last_epoch(), 12);
  const double wave = (1.0 + std::cos(std::numbers::pi * 2.5 / 20.0)) / 2.0;
  expect_rates(rates_of(optimizer), {0.5 * wave, 0.02 * wave});
}

// --- CyclicLR and OneCycleLR ---------------------------------------------------------------------

template <class Options>
double momentum_of(torch::optim::Optimizer& optimizer, std::size_t group) {
  auto& options = static_cast<Options&>(optimizer.param_groups()[group].options());
  if constexpr (requires { options.momentum(); }) {
    return options.momentum();
  } else {
    return std::get<0>(options.betas());
  }
}

/// A cycle of four steps.
template <class Optimizer, class Options>
void expect_cycles() {
  auto optimizer = two_groups<Optimizer, Options>();
  CyclicLR scheduler(optimizer, CyclicLROptions(0.1, std::vector<double>{0.5, 0.3})
                                    .step_size_up(2)
                                    .base_momentum(0.7)
                                    .max_momentum(std::vector<double>{0.9, 0.8}));
  const double places[] = {0.0, 0.5, 1.0, 0.5, 0.0, 0.5};
  for (const double place : places) {
    expect_rates(rates_of(optimizer), {0.1 + 0.4 * place, 0.1 + 0.2 * place}, 1e-14);
    EXPECT_NEAR(momentum_of<Options>(optimizer, 0), 0.9 - 0.2 * place, 1e-14);
    EXPECT_NEAR(momentum_of<Options>(optimizer, 1), 0.8 - 0.1 * place, 1e-14);
    scheduler.step();
  }
}

TEST(CyclicLR, MovesTheMomentumOfEveryOptimizerThatHasOne) {
  expect_cycles<FusedAdam, FusedAdamOptions>();
  expect_cycles<FusedLAMB, FusedLAMBOptions>();
  expect_cycles<FusedLARS, FusedLARSOptions>();
  expect_cycles<FusedLion, FusedLionOptions>();
  expect_cycles<FusedMuon, FusedMuonOptions>();
  expect_cycles<FusedNovoGrad, FusedNovoGradOptions>();
  expect_cycles<FusedSGD, FusedSGDOptions>();
  expect_cycles<torch::optim::Adam, torch::optim::AdamOptions>();
  expect_cycles<torch::optim::AdamW, torch::optim::AdamWOptions>();
  expect_cycles<torch::optim::RMSprop, torch::optim::RMSpropOptions>();
  expect_cycles<torch::optim::SGD, torch::optim::SGDOptions>();
  auto optimizer = two_groups<FusedAdam, FusedAdamOptions>();
  const CyclicLR scheduler(optimizer, CyclicLROptions(0.1, 0.5));
  EXPECT_EQ(std::get<1>(options_of(optimizer).betas()), 0.999);
}

TEST(CyclicLR, RefusesOptimizersWithoutMomentum) {
  auto fused = two_groups<FusedAdagrad, FusedAdagradOptions>();
  auto of_torch = two_groups<torch::optim::Adagrad, torch::optim::AdagradOptions>();
  for (torch::optim::Optimizer* optimizer : {static_cast<torch::optim::Optimizer*>(&fused),
                                             static_cast<torch::optim::Optimizer*>(&of_torch)}) {
    expect_error(
        [&] { CyclicLR(*optimizer, CyclicLROptions(0.1, 0.5)); },
        "CyclicLR: expected options with momentum or betas in group 0 (FusedAdam, "
        "FusedLAMB, FusedLARS, FusedLion, FusedMuon, FusedNovoGrad, FusedSGD, or torch's Adam, "
        "AdamW, RMSprop or SGD), got other options. Use cycle_momentum(false).");
    expect_error([&] { OneCycleLR(*optimizer, OneCycleLROptions(0.1).total_steps(9)); },
                 "OneCycleLR: expected options with momentum or betas in group 0");
    EXPECT_EQ(rates_of(*optimizer), base_rates());
    const CyclicLR scheduler(*optimizer, CyclicLROptions(0.1, 0.5).cycle_momentum(false));
    EXPECT_EQ(rates_of(*optimizer), (Rates{0.1, 0.1}));
  }
}

TEST(CyclicLR, TakesAFunctionForTheHeight) {
  auto optimizer = two_groups();
  CyclicLR scheduler(optimizer, CyclicLROptions(0.0, 1.0)
                                    .step_size_up(1)
                                    .scale_fn([](double cycle) { return 1.0 / (10.0 * cycle); })
                                    .cycle_momentum(false));
  scheduler.step();
  expect_rates(rates_of(optimizer), {0.1, 0.1});
  scheduler.step();
  scheduler.step();
  expect_rates(rates_of(optimizer), {0.05, 0.05});
}

TEST(OneCycleLR, EndsAfterItsSteps) {
  auto optimizer = two_groups();
  OneCycleLR scheduler(optimizer, OneCycleLROptions(1.0).epochs(2).steps_per_epoch(2));
  for (int step = 0; step < 4; ++step) scheduler.step();
  const Rates last = rates_of(optimizer);
  expect_error([&] { scheduler.step(); },
               "OneCycleLR.step: expected at most total_steps = 4 steps, got step 5.");
  EXPECT_EQ(rates_of(optimizer), last);
  EXPECT_EQ(scheduler.last_epoch(), 4);
}

// --- ReduceLROnPlateau ---------------------------------------------------------------------------

TEST(ReduceLROnPlateau, RatesOfTheFirstGroupAfterEachMetric) {
  struct Case {
    ReduceLROnPlateauOptions options;
    std::vector<double> metrics;
    Rates rates;
  };
  const auto halving = [] {
    return ReduceLROnPlateauOptions().factor(0.5).patience(1).min_lr(0.1);
  };
  const auto rising = halving().mode("max");
  const std::vector<double> up{1.0, 1.05, 1.1, 1.15};
  const std::vector<double> down{100.0, 99.0, 98.0, 97.0};
  const Rates kept{0.5, 0.5, 0.5, 0.5};
  const Rates reduced{0.5, 0.5, 0.25, 0.25};
  const double nan = std::numeric_limits<double>::quiet_NaN();
  using Options = ReduceLROnPlateauOptions;
  const std::vector<Case> cases{
      {halving(),
       {1.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5},
       {0.5, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.1}},
      {Options(rising).threshold(0.04), up, kept},
      {Options(rising).threshold(0.2), up, reduced},
      {Options(rising).threshold(0.04).threshold_mode("abs"), up, kept},
      {Options(rising).threshold(0.2).threshold_mode("abs"), up, reduced},
      {halving().threshold(0.5).threshold_mode("abs"), down, kept},
      {halving().threshold(0.5), down, reduced},
      {halving().threshold(0.005), down, kept},
      {halving().patience(0).cooldown(2),
       {1.0, 1.0, 1.0, 1.0, 1.0},
       {0.5, 0.25, 0.25, 0.25, 0.125}},
      {halving().patience(0).eps(0.2), {1.0, 1.0, 1.0}, {0.5, 0.25, 0.25}},
      {halving(), {1.0, nan, nan}, {0.5, 0.5, 0.25}},
  };
  for (std::size_t index = 0; index < cases.size(); ++index) {
    auto optimizer = two_groups();
    ReduceLROnPlateau scheduler(optimizer, cases[index].options);
    Rates rates;
    for (const double metric : cases[index].metrics) {
      scheduler.step(metric);
      rates.push_back(scheduler.get_last_lr()[0]);
    }
    EXPECT_EQ(rates, cases[index].rates) << "case " << index;
    EXPECT_EQ(scheduler.last_epoch(), static_cast<std::int64_t>(rates.size()));
  }
}

TEST(ReduceLROnPlateau, HasARateForEachGroup) {
  auto optimizer = two_groups();
  const auto options = ReduceLROnPlateauOptions().factor(0.5).patience(0);
  ReduceLROnPlateau scheduler(
      optimizer, ReduceLROnPlateauOptions(options).min_lr(std::vector<double>{0.4, 0.001}));
  scheduler.step(1.0);
  scheduler.step(1.0);
  EXPECT_EQ(rates_of(optimizer), (Rates{0.4, 0.01}));
  LRScheduler& base = scheduler;
  expect_error([&] { base.step(); },
               "ReduceLROnPlateau.step: expected a metric, got none. Call step(validation_loss).");
}

TEST(LRSchedulerState, APlateauGoesOnWhereItWasSaved) {
  const auto options = ReduceLROnPlateauOptions().factor(0.5).patience(1).cooldown(1);
  auto optimizer = two_groups();
  ReduceLROnPlateau whole(optimizer, options);
  for (const double metric : {1.0, 2.0, 2.0}) whole.step(metric);
  auto other = two_groups(rates_of(optimizer));
  ReduceLROnPlateau resumed(other, ReduceLROnPlateauOptions().mode("max"));
  load(resumed, saved(whole));
  for (const double metric : {2.0, 0.9, 2.0, 2.0, 2.0}) {
    whole.step(metric);
    resumed.step(metric);
    EXPECT_EQ(rates_of(other), rates_of(optimizer));
  }
  EXPECT_EQ(rates_of(optimizer), (Rates{0.125, 0.005}));
}

}  // namespace
}  // namespace torchfuse::testing
