// SPDX-License-Identifier: BSD-3-Clause
// Arguments out of range are refused by name, and the rates stay as they were.

#include <torchfuse/torchfuse.h>

#include <cmath>
#include <limits>

#include "scheduler_testing.h"

namespace torchfuse::testing {
namespace {

using namespace optim;  // NOLINT(google-build-using-namespace): all schedulers
using SchedulerList = std::vector<std::shared_ptr<LRScheduler>>;

const double kNoNumber = std::numeric_limits<double>::quiet_NaN();
const double kEndless = std::numeric_limits<double>::infinity();

/// The message is the class's name, ": expected ", and `text`.
template <class Class, class... Arguments>
void refuses(const std::string& text, const Arguments&... arguments) {
  auto optimizer = two_groups();
  const std::string name = c10::demangle_type<Class>();
  expect_error([&] { Class(optimizer, arguments...); },
               name.substr(name.rfind(':') + 1) + ": expected " + text);
  EXPECT_EQ(rates_of(optimizer), base_rates());
}

TEST(LRSchedulerBadInput, OfFormulas) {
  using Milestones = std::vector<std::int64_t>;
  refuses<StepLR>("step_size to be at least 1, got 0.", 0);
  refuses<StepLR>("gamma to be finite and at least 0, got nan.", 1, kNoNumber);
  refuses<StepLR>("gamma to be finite and at least 0, got -0.5.", 1, -0.5);
  refuses<StepLR>("last_epoch to be at least 0, or -1 for a new run, got -2.", 1, 0.1, -2);
  refuses<MultiStepLR>(
      "milestones to be at least 0 and not decreasing, got 3 after 5. Sort the milestones.",
      Milestones{5, 3});
  refuses<MultiStepLR>("milestones to be at least 0", Milestones{-1});
  refuses<ExponentialLR>("gamma to be finite and at least 0, got inf.", kEndless);
  refuses<ConstantLR>("factor to be greater than 0 and at most 1, got 0.", 0.0);
  refuses<ConstantLR>("total_iters to be at least 1, got 0.", 0.5, 0);
  refuses<LinearLR>("start_factor to be greater than 0 and at most 1, got 0.", 0.0);
  refuses<LinearLR>("end_factor to be from 0 to 1, got 2.", 0.5, 2.0);
  refuses<LinearLR>("total_iters to be at least 1, got -3.", 0.5, 1.0, -3);
  refuses<PolynomialLR>("total_iters to be at least 1, got 0.", 0);
  refuses<PolynomialLR>("power to be finite and at least 0, got nan.", 5, kNoNumber);
  refuses<CosineAnnealingLR>("T_max to be at least 1, got 0.", 0);
  refuses<CosineAnnealingLR>("eta_min to be finite and at least 0, got -1.", 5, -1.0);
  refuses<CosineAnnealingWarmRestarts>("T_0 to be at least 1, got 0.", 0);
  refuses<CosineAnnealingWarmRestarts>("T_mult to be at least 1, got 0.", 5, 0);
  auto optimizer = two_groups();
  CosineAnnealingWarmRestarts scheduler(optimizer, 5);
  expect_error([&] { scheduler.step(kNoNumber); },
               "CosineAnnealingWarmRestarts.step: expected epoch to be finite and at least 0, got "
               "nan.");
}

TEST(LRSchedulerBadInput, OfCycles) {
  const CyclicLROptions cycle(0.1, 0.5);
  const auto cycle_once = OneCycleLROptions(0.1).total_steps(9);
  refuses<CyclicLR>("base_lr of group 1 to be finite and at least 0, got -1.",
                    CyclicLROptions(std::vector<double>{0.1, -1.0}, 0.5));
  refuses<CyclicLR>("max_lr to be one number or one for each of the 2 parameter groups, got 3.",
                    CyclicLROptions(0.1, std::vector<double>{1.0, 2.0, 3.0}));
  refuses<CyclicLR>("step_size_up to be at least 1, got 0.",
                    CyclicLROptions(cycle).step_size_up(0));
  refuses<CyclicLR>("mode to be one of triangular, triangular2, exp_range, got square.",
                    CyclicLROptions(cycle).mode("square"));
  refuses<CyclicLR>("max_momentum of group 0 to be at least 0 and less than 1, got 1.",
                    CyclicLROptions(cycle).max_momentum(1.0));
  refuses<CyclicLR>("the rate of group 0 in epoch 0 to be finite, got nan.",
                    CyclicLROptions(cycle).scale_fn([](double) { return kNoNumber; }));
  refuses<OneCycleLR>("total_steps, or both epochs and steps_per_epoch, got neither.",
                      OneCycleLROptions(0.1).epochs(3));
  refuses<OneCycleLR>("total_steps to be at least 1, got 0.",
                      OneCycleLROptions(cycle_once).total_steps(0));
  refuses<OneCycleLR>("pct_start to be from 0 to 1, got 1.5.",
                      OneCycleLROptions(cycle_once).pct_start(1.5));
  refuses<OneCycleLR>("pct_start * total_steps not to be 1, got 0.5 * 2",
                      OneCycleLROptions(cycle_once).total_steps(2).pct_start(0.5));
  refuses<OneCycleLR>("anneal_strategy to be one of cos, linear, got sine.",
                      OneCycleLROptions(cycle_once).anneal_strategy("sine"));
  refuses<OneCycleLR>("div_factor to be finite and greater than 0, got 0.",
                      OneCycleLROptions(cycle_once).div_factor(0.0));
}

TEST(LRSchedulerBadInput, OfPlateausAndFunctions) {
  using Options = ReduceLROnPlateauOptions;
  using Functions = std::vector<LRLambdas::Function>;
  refuses<ReduceLROnPlateau>("factor to be at least 0 and less than 1, got 1.",
                             Options().factor(1.0));
  refuses<ReduceLROnPlateau>("patience to be at least 0, got -1.", Options().patience(-1));
  refuses<ReduceLROnPlateau>("mode to be one of min, max, got less.", Options().mode("less"));
  refuses<ReduceLROnPlateau>("threshold_mode to be one of rel, abs, got sum.",
                             Options().threshold_mode("sum"));
  refuses<ReduceLROnPlateau>(
      "min_lr to be one number or one for each of the 2 parameter groups, got 1.",
      Options().min_lr(std::vector<double>{0.1}));
  const auto one = [](std::int64_t) { return 1.0; };
  refuses<LambdaLR>(
      "lr_lambda to be one function or one for each of the 2 parameter groups, got 1.",
      Functions{one});
  refuses<MultiplicativeLR>("lr_lambda of group 1 to be a function, got an empty one.",
                            Functions{one, nullptr});
}

TEST(LRSchedulerBadInput, OfSequencesAndChains) {
  auto optimizer = two_groups();
  auto other = two_groups();
  const auto step = [](torch::optim::Optimizer& of) { return std::make_shared<StepLR>(of, 1); };
  const auto plateau = std::make_shared<ReduceLROnPlateau>(optimizer);
  const auto chain = std::make_shared<ChainedScheduler>(SchedulerList{step(optimizer)});
  const auto refuses_list = [&](const SchedulerList& schedulers,
                                std::vector<std::int64_t> milestones, const std::string& text) {
    expect_error([&] { SequentialLR(optimizer, schedulers, std::move(milestones)); },
                 "SequentialLR: expected " + text);
    EXPECT_EQ(rates_of(optimizer), base_rates());
  };
  refuses_list({}, {}, "at least one scheduler, got none.");
  refuses_list({step(optimizer), nullptr}, {1},
               "schedulers[1] to be a scheduler, got a null pointer.");
  refuses_list({step(optimizer), plateau}, {1},
               "schedulers[1] to step without a metric, got a ReduceLROnPlateau. Step the "
               "ReduceLROnPlateau separately.");
  refuses_list({step(optimizer), step(other)}, {1},
               "schedulers[1] to belong to the same optimizer, got a StepLR of another optimizer.");
  refuses_list({step(optimizer), chain}, {1},
               "schedulers[1] to contain no schedulers, got a ChainedScheduler.");
  refuses_list({step(optimizer)}, {4}, "0 milestones, one fewer than schedulers, got 1.");
  refuses_list({step(optimizer), step(optimizer), step(optimizer)}, {5, 5},
               "milestones[1] to be at least 6, got 5. Milestones must increase.");
  refuses_list({step(optimizer), step(optimizer)}, {0}, "milestones[0] to be at least 1");
  expect_error([&] { ChainedScheduler(SchedulerList{step(optimizer), step(other)}); },
               "ChainedScheduler: expected schedulers[1] to belong to the same optimizer, got a "
               "StepLR of another optimizer.");
  expect_error([] { ChainedScheduler(SchedulerList{}); },
               "ChainedScheduler: expected at least one scheduler, got none.");
}

TEST(LRSchedulerBadInput, OfRatesAndGroupsOfTheOptimizer) {
  for (const double rate : {-0.1, kNoNumber}) {
    auto optimizer = two_groups(Rates{0.1, rate});
    expect_error([&] { StepLR(optimizer, 1); },
                 "StepLR: expected lr of group 1 to be finite and at least 0, got ");
  }
  auto optimizer = two_groups();
  StepLR scheduler(optimizer, 1);
  optimizer.add_param_group(
      torch::optim::OptimizerParamGroup({torch::ones({1}).requires_grad_(true)}));
  const Rates before = rates_of(optimizer);
  expect_error([&] { scheduler.step(); },
               "StepLR: expected the optimizer to have 2 parameter groups, as at construction, got "
               "3. Construct a new scheduler after add_param_group().");
  EXPECT_EQ(rates_of(optimizer), before);
  EXPECT_EQ(scheduler.last_epoch(), 0);
}

/// The second group's rate is refused: the first one's must not have been set.
TEST(LRSchedulerBadInput, AStepIsAllOrNothing) {
  for (const auto& [wrong, text] : {std::pair{-1.0, "to be at least 0"},
                                    {kNoNumber,
                                     "LambdaLR: expected the rate of group 1 in epoch 1 to "
                                     "be finite, got nan."}}) {
    auto optimizer = two_groups<FusedAdam, FusedAdamOptions>();
    const auto half = [](std::int64_t epoch) { return epoch == 0 ? 1.0 : 0.5; };
    const auto refused = [value = wrong](std::int64_t epoch) { return epoch == 0 ? 1.0 : value; };
    LambdaLR scheduler(optimizer, std::vector<LRLambdas::Function>{half, refused});
    for (int attempt = 0; attempt < 2; ++attempt) {
      expect_error([&] { scheduler.step(); }, text);
      EXPECT_EQ(rates_of(optimizer), base_rates());
      EXPECT_EQ(scheduler.get_last_lr(), base_rates());
      EXPECT_EQ(scheduler.last_epoch(), 0);
    }
  }
}

/// Of several schedulers, the last one fails: those before it have not stepped, as to rates,
/// momenta and epochs.
TEST(LRSchedulerBadInput, AStepOfAChainIsAllOrNothing) {
  auto optimizer = two_groups();
  const auto cycle =
      std::make_shared<CyclicLR>(optimizer, CyclicLROptions(0.1, 0.5).step_size_up(3));
  const auto decay = std::make_shared<ExponentialLR>(optimizer, 0.5);
  bool fails = true;
  const auto last = std::make_shared<MultiplicativeLR>(
      optimizer, [&](std::int64_t) { return fails ? kEndless : 1.0; });
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
    for (const auto& inner : SchedulerList{cycle, decay, last}) EXPECT_EQ(inner->last_epoch(), 0);
  }
  fails = false;
  scheduler.step();
  EXPECT_EQ(scheduler.last_epoch(), 1);
  EXPECT_LT(momentum(), before);
}

TEST(LRSchedulerBadInput, AConstructorOfASequenceIsAllOrNothing) {
  auto optimizer = two_groups();
  int calls = 0;
  const auto first = std::make_shared<LambdaLR>(
      optimizer, [&](std::int64_t) { return ++calls <= 2 ? 0.5 : kNoNumber; });
  const auto second = std::make_shared<ExponentialLR>(optimizer, 0.9);
  const Rates rates = rates_of(optimizer);
  expect_error([&] { SequentialLR(optimizer, {first, second}, {3}); }, "to be finite, got nan");
  EXPECT_EQ(rates_of(optimizer), rates);
  EXPECT_EQ(first->last_epoch(), 0);
  EXPECT_EQ(second->last_epoch(), 0);
}

}  // namespace
}  // namespace torchfuse::testing
