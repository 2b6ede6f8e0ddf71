// SPDX-License-Identifier: BSD-3-Clause
// Schedulers that have a closed form, against it over 1,000 epochs. Python's own classes are the
// oracle of tests/python/checkpoint/test_cpp_schedulers.py.
#include <torchfuse/optim/lr_scheduler/cosine_annealing_lr.h>
#include <torchfuse/optim/lr_scheduler/lambda_lr.h>
#include <torchfuse/optim/lr_scheduler/linear_lr.h>
#include <torchfuse/optim/lr_scheduler/step_lr.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "scheduler_testing.h"

namespace torchfuse::testing {
namespace {

using namespace optim;  // NOLINT(google-build-using-namespace): all schedulers

constexpr std::int64_t kSteps = 1000;

TEST(LRSchedulerFormulas, LambdaLR) {
  auto optimizer = two_groups();
  const auto factor = [](std::int64_t epoch) { return 1.0 / (1.0 + static_cast<double>(epoch)); };
  LambdaLR scheduler(optimizer, factor);
  expect_factors(scheduler, kSteps, factor);
}

TEST(LRSchedulerFormulas, LambdaLROfEachGroup) {
  auto optimizer = two_groups();
  LambdaLR scheduler(optimizer, std::vector<LRLambdas::Function>{
                                    [](std::int64_t) { return 1.0; },
                                    [](std::int64_t epoch) { return std::pow(0.5, epoch); }});
  scheduler.step();
  scheduler.step();
  expect_rates(rates_of(optimizer), {0.5, 0.02 * 0.25});
}

TEST(LRSchedulerFormulas, MultiplicativeLR) {
  auto optimizer = two_groups();
  MultiplicativeLR scheduler(optimizer, [](std::int64_t epoch) { return epoch == 0 ? 7.0 : 0.99; });
  expect_factors(scheduler, kSteps, [](std::int64_t epoch) { return std::pow(0.99, epoch); });
}

TEST(LRSchedulerFormulas, StepLR) {
  auto optimizer = two_groups();
  StepLR scheduler(optimizer, 30, 0.9);
  expect_factors(scheduler, kSteps, [](std::int64_t epoch) { return std::pow(0.9, epoch / 30); });
}

TEST(LRSchedulerFormulas, MultiStepLR) {
  auto optimizer = two_groups();
  MultiStepLR scheduler(optimizer, {10, 30, 30, 600}, 0.3);
  expect_factors(scheduler, kSteps, [](std::int64_t epoch) {
    return std::pow(0.3, (epoch >= 10) + 2 * (epoch >= 30) + (epoch >= 600));
  });
}

TEST(LRSchedulerFormulas, ExponentialLR) {
  auto optimizer = two_groups();
  ExponentialLR scheduler(optimizer, 0.999);
  expect_factors(scheduler, kSteps, [](std::int64_t epoch) { return std::pow(0.999, epoch); });
}

TEST(LRSchedulerFormulas, ConstantLR) {
  auto optimizer = two_groups();
  ConstantLR scheduler(optimizer, 0.3, 400);
  expect_factors(scheduler, kSteps, [](std::int64_t epoch) { return epoch < 400 ? 0.3 : 1.0; });
}

TEST(LRSchedulerFormulas, LinearLR) {
  auto optimizer = two_groups();
  LinearLR scheduler(optimizer, 0.1, 0.9, 700);
  expect_factors(scheduler, kSteps, [](std::int64_t epoch) {
    return 0.1 + 0.8 * static_cast<double>(std::min<std::int64_t>(epoch, 700)) / 700.0;
  });
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

TEST(LRSchedulerFormulas, PolynomialLR) {
  auto optimizer = two_groups();
  PolynomialLR scheduler(optimizer, 900, 1.7);
  expect_factors(scheduler, kSteps, [](std::int64_t epoch) {
    return std::pow(1.0 - static_cast<double>(std::min<std::int64_t>(epoch, 900)) / 900.0, 1.7);
  });
}

/// The recursion divides by numbers near 0 at the bottom of every wave.
TEST(LRSchedulerFormulas, CosineAnnealingLR) {
  auto optimizer = two_groups();
  CosineAnnealingLR scheduler(optimizer, 130);
  for (std::int64_t epoch = 1; epoch <= 130; ++epoch) {
    scheduler.step();
    Rates expected = base_rates();
    const double wave = std::cos(std::numbers::pi * static_cast<double>(epoch) / 130.0);
    for (double& rate : expected) rate *= (1.0 + wave) / 2.0;
    expect_rates(rates_of(optimizer), expected);
  }
}

TEST(LRSchedulerFormulas, CosineAnnealingLRWithASmallestRate) {
  auto optimizer = two_groups();
  CosineAnnealingLR scheduler(optimizer, 4, 0.01);
  for (std::int64_t epoch = 0; epoch < 4; ++epoch) scheduler.step();
  expect_rates(rates_of(optimizer), {0.01, 0.01});
  for (std::int64_t epoch = 4; epoch < 8; ++epoch) scheduler.step();
  expect_rates(rates_of(optimizer), base_rates());
}

TEST(LRSchedulerFormulas, CosineAnnealingWarmRestarts) {
  auto optimizer = two_groups();
  CosineAnnealingWarmRestarts scheduler(optimizer, 10, 2);
  expect_factors(scheduler, kSteps, [](std::int64_t epoch) {
    std::int64_t start = 0;
    std::int64_t length = 10;
    while (epoch >= start + length) {
      start += length;
      length *= 2;
    }
    const double part = static_cast<double>(epoch - start) / static_cast<double>(length);
    return (1.0 + std::cos(std::numbers::pi * part)) / 2.0;
  });
}

TEST(LRSchedulerFormulas, CosineAnnealingWarmRestartsTakesPartsOfEpochs) {
  auto optimizer = two_groups();
  CosineAnnealingWarmRestarts scheduler(optimizer, 10, 2);
  scheduler.step(12.5);
  EXPECT_EQ(scheduler.last_epoch(), 12);
  const double wave = std::cos(std::numbers::pi * 2.5 / 20.0);
  expect_rates(rates_of(optimizer), {0.5 * (1.0 + wave) / 2.0, 0.02 * (1.0 + wave) / 2.0});
}

}  // namespace
}  // namespace torchfuse::testing
