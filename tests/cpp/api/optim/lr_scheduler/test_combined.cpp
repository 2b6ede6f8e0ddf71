// SPDX-License-Identifier: BSD-3-Clause
// Schedulers of schedulers, and the one that steps by a metric.
#include <torchfuse/optim/lr_scheduler/chained_scheduler.h>
#include <torchfuse/optim/lr_scheduler/cyclic_lr.h>
#include <torchfuse/optim/lr_scheduler/lambda_lr.h>
#include <torchfuse/optim/lr_scheduler/linear_lr.h>
#include <torchfuse/optim/lr_scheduler/reduce_lr_on_plateau.h>
#include <torchfuse/optim/lr_scheduler/sequential_lr.h>
#include <torchfuse/optim/lr_scheduler/step_lr.h>

#include <cmath>
#include <limits>

#include "scheduler_testing.h"

namespace torchfuse::testing {
namespace {

using namespace optim;  // NOLINT(google-build-using-namespace): all schedulers
using Schedulers = std::vector<std::shared_ptr<LRScheduler>>;

TEST(SequentialLR, TakesTurnsAtTheMilestones) {
  auto optimizer = two_groups();
  SequentialLR scheduler(optimizer,
                         {std::make_shared<LinearLR>(optimizer, 0.25, 1.0, 3),
                          std::make_shared<ExponentialLR>(optimizer, 0.9)},
                         {3});
  expect_factors(scheduler, 50, [](std::int64_t epoch) {
    if (epoch < 3) return 0.25 + 0.25 * static_cast<double>(epoch);
    return std::pow(0.9, epoch - 3);
  });
}

TEST(SequentialLR, RefusesWhatCannotFollow) {
  auto optimizer = two_groups();
  auto other = two_groups();
  const auto step = [](torch::optim::Optimizer& of) { return std::make_shared<StepLR>(of, 1); };
  const auto plateau = std::make_shared<ReduceLROnPlateau>(optimizer);
  const auto chain = std::make_shared<ChainedScheduler>(Schedulers{step(optimizer)});
  const auto refuses = [&](const Schedulers& schedulers, std::vector<std::int64_t> milestones,
                           const std::string& text) {
    expect_error([&] { SequentialLR(optimizer, schedulers, std::move(milestones)); },
                 "SequentialLR: expected " + text);
    EXPECT_EQ(rates_of(optimizer), base_rates());
  };
  refuses({}, {}, "at least one scheduler, got none.");
  refuses({step(optimizer), nullptr}, {1}, "schedulers[1] to be a scheduler, got a null pointer.");
  refuses({step(optimizer), plateau}, {1},
          "schedulers[1] to step without a metric, got a ReduceLROnPlateau. Step that by itself.");
  refuses({step(optimizer), step(other)}, {1},
          "schedulers[1] to belong to the same optimizer, got a StepLR of another one.");
  refuses({step(optimizer), chain}, {1},
          "schedulers[1] to have a formula for its first epoch, got a ChainedScheduler.");
  refuses({step(optimizer)}, {4}, "0 milestones, one fewer than schedulers, got 1.");
  refuses({step(optimizer), step(optimizer), step(optimizer)}, {5, 5},
          "milestones[1] to be at least 6, after those before it, got 5.");
  refuses({step(optimizer), step(optimizer)}, {0}, "milestones[0] to be at least 1");
}

TEST(ChainedScheduler, MultipliesItsSchedulers) {
  auto optimizer = two_groups();
  ChainedScheduler scheduler({std::make_shared<ConstantLR>(optimizer, 0.1, 20),
                              std::make_shared<ExponentialLR>(optimizer, 0.99)});
  expect_factors(scheduler, 100, [](std::int64_t epoch) {
    return (epoch < 20 ? 0.1 : 1.0) * std::pow(0.99, epoch);
  });
}

TEST(SequentialLR, ItsConstructorIsAllOrNothing) {
  auto optimizer = two_groups();
  int calls = 0;
  const auto first = std::make_shared<LambdaLR>(optimizer, [&](std::int64_t) {
    return ++calls <= 2 ? 0.5 : std::numeric_limits<double>::quiet_NaN();
  });
  const auto second = std::make_shared<ExponentialLR>(optimizer, 0.9);
  const Rates rates = rates_of(optimizer);
  expect_error([&] { SequentialLR(optimizer, {first, second}, {3}); }, "to be finite, got nan");
  EXPECT_EQ(rates_of(optimizer), rates);
  EXPECT_EQ(first->last_epoch(), 0);
  EXPECT_EQ(second->last_epoch(), 0);
}

/// The last one fails: those before it have not stepped, as to rates, momenta and epochs.
TEST(ChainedScheduler, AStepIsAllOrNothing) {
  auto optimizer = two_groups();
  const auto cycle =
      std::make_shared<CyclicLR>(optimizer, CyclicLROptions(0.1, 0.5).step_size_up(3));
  const auto decay = std::make_shared<ExponentialLR>(optimizer, 0.5);
  bool fails = true;
  const auto last = std::make_shared<MultiplicativeLR>(optimizer, [&](std::int64_t) {
    return fails ? std::numeric_limits<double>::infinity() : 1.0;
  });
  ChainedScheduler scheduler({cycle, decay, last});
  const auto momentum = [&] {
    return static_cast<torch::optim::SGDOptions&>(optimizer.param_groups()[1].options()).momentum();
  };
  const Rates rates = rates_of(optimizer);
  const double before = momentum();
  for (int attempt = 0; attempt < 2; ++attempt) {
    expect_error([&] { scheduler.step(); }, "MultiplicativeLR: expected the rate of group 0");
    EXPECT_EQ(rates_of(optimizer), rates);
    EXPECT_EQ(momentum(), before);
    for (const auto& inner : Schedulers{cycle, decay, last}) EXPECT_EQ(inner->last_epoch(), 0);
  }
  fails = false;
  scheduler.step();
  EXPECT_EQ(scheduler.last_epoch(), 1);
  EXPECT_LT(momentum(), before);
}

TEST(ChainedScheduler, RefusesSchedulersOfTwoOptimizers) {
  auto optimizer = two_groups();
  auto other = two_groups();
  const Schedulers mixed{std::make_shared<StepLR>(optimizer, 1),
                         std::make_shared<StepLR>(other, 1)};
  expect_error([&] { const ChainedScheduler scheduler(mixed); },
               "ChainedScheduler: expected schedulers[1] to belong to the same optimizer, got a "
               "StepLR of another one.");
  expect_error([] { const ChainedScheduler scheduler(Schedulers{}); },
               "ChainedScheduler: expected at least one scheduler, got none.");
}

// --- ReduceLROnPlateau ---------------------------------------------------------------------------

/// Rates of the first group, after each metric.
Rates rates_after(const ReduceLROnPlateauOptions& options, const std::vector<double>& metrics) {
  auto optimizer = two_groups();
  ReduceLROnPlateau scheduler(optimizer, options);
  Rates rates;
  for (const double metric : metrics) {
    scheduler.step(metric);
    rates.push_back(scheduler.get_last_lr()[0]);
  }
  EXPECT_EQ(scheduler.last_epoch(), static_cast<std::int64_t>(metrics.size()));
  return rates;
}

ReduceLROnPlateauOptions halving() {
  return ReduceLROnPlateauOptions().factor(0.5).patience(1).min_lr(0.1);
}

TEST(ReduceLROnPlateau, WaitsForProgress) {
  EXPECT_EQ(rates_after(halving(), {1.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5}),
            (Rates{0.5, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.1}));
}

TEST(ReduceLROnPlateau, KnowsFourKindsOfProgress) {
  const std::vector<double> rising{1.0, 1.05, 1.1, 1.15};
  const Rates kept{0.5, 0.5, 0.5, 0.5};
  const Rates reduced{0.5, 0.5, 0.25, 0.25};
  EXPECT_EQ(rates_after(halving().mode("max").threshold(0.04), rising), kept);
  EXPECT_EQ(rates_after(halving().mode("max").threshold(0.2), rising), reduced);
  EXPECT_EQ(rates_after(halving().mode("max").threshold(0.04).threshold_mode("abs"), rising), kept);
  EXPECT_EQ(rates_after(halving().mode("max").threshold(0.2).threshold_mode("abs"), rising),
            reduced);
  const std::vector<double> falling{100.0, 99.0, 98.0, 97.0};
  EXPECT_EQ(rates_after(halving().threshold(0.5).threshold_mode("abs"), falling), kept);
  EXPECT_EQ(rates_after(halving().threshold(0.5), falling), reduced);
  EXPECT_EQ(rates_after(halving().threshold(0.005), falling), kept);
}

TEST(ReduceLROnPlateau, CoolsDown) {
  EXPECT_EQ(rates_after(halving().patience(0).cooldown(2), {1.0, 1.0, 1.0, 1.0, 1.0}),
            (Rates{0.5, 0.25, 0.25, 0.25, 0.125}));
}

TEST(ReduceLROnPlateau, LeavesSmallChangesOut) {
  EXPECT_EQ(rates_after(halving().patience(0).eps(0.2), {1.0, 1.0, 1.0}), (Rates{0.5, 0.25, 0.25}));
}

TEST(ReduceLROnPlateau, ANaNIsNoProgress) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(rates_after(halving(), {1.0, nan, nan}), (Rates{0.5, 0.5, 0.25}));
}

TEST(ReduceLROnPlateau, HasARateForEachGroup) {
  auto optimizer = two_groups();
  ReduceLROnPlateau scheduler(optimizer,
                              halving().patience(0).min_lr(std::vector<double>{0.4, 0.001}));
  scheduler.step(1.0);
  scheduler.step(1.0);
  EXPECT_EQ(rates_of(optimizer), (Rates{0.4, 0.01}));
  LRScheduler& base = scheduler;
  expect_error([&] { base.step(); },
               "ReduceLROnPlateau.step: expected a metric, got none. Call step(validation_loss).");
}

}  // namespace
}  // namespace torchfuse::testing
