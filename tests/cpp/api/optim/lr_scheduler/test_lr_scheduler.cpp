// SPDX-License-Identifier: BSD-3-Clause
// What all schedulers share: the first step, base rates, edits between steps, skipped steps, states
// that are saved, loaded, and refused with nothing changed.

#include <torchfuse/torchfuse.h>

#include <cmath>
#include <limits>

#include "scheduler_testing.h"

namespace torchfuse::testing {
namespace {

using amp::GradScaler;
using amp::GradScalerOptions;
using namespace optim;  // NOLINT(google-build-using-namespace): all schedulers

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
    const CosineAnnealingLR second(optimizer, 10);
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

/// A class whose formulas of an epoch alone can be asked.
template <class Scheduler>
struct Open : Scheduler {
  using Scheduler::closed_form_lr;
  using Scheduler::Scheduler;
};

template <class Scheduler, class... Arguments>
void expect_both_forms_agree(const Arguments&... arguments) {
  auto optimizer = two_groups();
  Open<Scheduler> scheduler(optimizer, arguments...);
  for (int epoch = 0; epoch < 8; ++epoch) {
    const auto rates = rates_of(optimizer);
    const auto closed = scheduler.closed_form_lr(epoch);
    ASSERT_TRUE(closed.has_value());
    for (std::size_t i = 0; i < rates.size(); ++i) {
      EXPECT_NEAR(closed->at(i), rates[i], 1e-15) << "group " << i << ", epoch " << epoch;
    }
    scheduler.step();
  }
}

TEST(LRScheduler, TheRatesOfAnEpochAreThoseOfItsSteps) {
  expect_both_forms_agree<StepLR>(3, 0.5);
  expect_both_forms_agree<MultiStepLR>(std::vector<std::int64_t>{2, 2, 5}, 0.5);
  expect_both_forms_agree<ExponentialLR>(0.5);
  expect_both_forms_agree<PolynomialLR>(5, 2.0);
}

TEST(LRScheduler, MilestonesAreResumed) {
  expect_resumes(
      [](auto& of) {
        return std::make_shared<MultiStepLR>(of, std::vector<std::int64_t>{2, 4, 4}, 0.5);
      },
      3, 3);
}

TEST(LRScheduler, AProgramCanAddAClass) {
  auto optimizer = two_groups();
  expect_resumes([](auto& of) { return std::make_shared<Halving>(of); }, 3, 3);
  Halving scheduler(optimizer);
  scheduler.step();
  EXPECT_EQ(rates_of(optimizer), (Rates{0.25, 0.01}));
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
  expect_error(
      [&] { scheduler.step_if_applied(); },
      "StepLR.step_if_applied: expected a torchfuse optimizer, which records skipped steps, "
      "got another optimizer. Pass the scaler that steps the optimizer.");
  const GradScaler scaler(torch::kCPU);
  EXPECT_FALSE(scheduler.step_if_applied(scaler));
  const GradScaler disabled(torch::kCPU, GradScalerOptions().enabled(false));
  EXPECT_TRUE(scheduler.step_if_applied(disabled));
}

using Scheduler = std::shared_ptr<LRScheduler>;

Scheduler make_chain(torch::optim::Optimizer& optimizer) {
  return std::make_shared<ChainedScheduler>(std::vector<Scheduler>{
      std::make_shared<ConstantLR>(optimizer), std::make_shared<StepLR>(optimizer, 3)});
}

TEST(LRSchedulerState, AnArchiveReplacesTheArguments) {
  auto optimizer = two_groups();
  StepLR saved_one(optimizer, 2, 0.5);
  auto other = two_groups();
  StepLR loaded(other, 7, 0.1);
  load(loaded, saved(saved_one));
  for (int i = 0; i < 4; ++i) loaded.step();
  EXPECT_EQ(rates_of(other), (Rates{0.125, 0.005}));
}

/// The names of Python's `StepLR.state_dict()`.
TEST(LRSchedulerState, HasTheNamesOfPython) {
  auto optimizer = two_groups();
  const StepLR scheduler(optimizer, 2);
  std::vector<std::string> names;
  for (const auto& [key, value] : scheduler.state_dict()) names.push_back(key);
  EXPECT_EQ(names, (std::vector<std::string>{"_last_lr", "_step_count", "base_lrs", "gamma",
                                             "last_epoch", "step_size"}));
}

/// Python's rates are tensors if those of the optimizer are.
TEST(LRSchedulerState, NumbersMayBeTensors) {
  auto optimizer = two_groups();
  StepLR scheduler(optimizer, 2);
  LRSchedulerState state = scheduler.state_dict();
  state["base_lrs"] = c10::List<at::Tensor>({torch::scalar_tensor(0.25), torch::tensor({2})});
  state["gamma"] = torch::scalar_tensor(0.5);
  scheduler.load_state_dict(state);
  EXPECT_EQ(scheduler.base_lrs(), (Rates{0.25, 2.0}));
  EXPECT_EQ(scheduler.state_dict().at("gamma").toDouble(), 0.5);
  state["gamma"] = torch::ones({2});
  expect_error([&] { scheduler.load_state_dict(state); },
               "expected the state's gamma to be finite");
}

TEST(LRSchedulerState, RefusesDamagedStates) {
  auto optimizer = two_groups();
  StepLR scheduler(optimizer, 2);
  const auto refuses = [&](const char* key, const c10::IValue& value, const std::string& text) {
    LRSchedulerState state = scheduler.state_dict();
    state["step_size"] = 9;  // must not get through
    if (value.isNone()) {
      state.erase(key);
    } else {
      state[key] = value;
    }
    expect_error([&] { scheduler.load_state_dict(state); }, "StepLR.load_state_dict: " + text);
    EXPECT_EQ(scheduler.state_dict().at("step_size").toInt(), 2);
  };
  refuses("gamma", {},
          "expected the state to hold 'gamma', got none. Load a state that the same class saved.");
  refuses("gamma", "0.1", "expected the state's gamma to be finite and at least 0, got 0.1.");
  refuses("gamma", -1.0, "expected the state's gamma to be finite and at least 0, got -1.");
  refuses("last_epoch", -2,
          "expected the state's last_epoch to be an integer of at least -1, got -2.");
  refuses("base_lrs", std::vector<double>{0.5},
          "expected the state's base_lrs to be 2 numbers, one per parameter group, got [0.5]. "
          "Load the state with an optimizer that has as many groups.");
  refuses("base_lrs", std::vector<double>{0.1, std::nan("")},
          "expected the state's base_lrs to be finite numbers, got nan.");
}

TEST(LRSchedulerState, RefusesArchivesOfOthers) {
  auto optimizer = two_groups();
  StepLR scheduler(optimizer, 2);
  expect_error([&] { load(scheduler, saved(ExponentialLR(optimizer, 0.5))); },
               "StepLR.load: expected the archive's scheduler to be StepLR, got ExponentialLR. "
               "Load an archive that torch::save wrote for this class.");
  expect_error([&] { load(scheduler, saved(optimizer)); },
               "StepLR.load: expected the archive to hold format, got none. Load an archive that "
               "torch::save wrote for a scheduler.");
  torch::serialize::OutputArchive later;
  later.write("format", c10::IValue("torchfuse.optim.lr_scheduler.2"));
  torch::serialize::InputArchive archive = reopened(later);
  expect_error([&] { scheduler.load(archive); },
               "StepLR.load: expected the archive's format to be torchfuse.optim.lr_scheduler.1, "
               "got torchfuse.optim.lr_scheduler.2.");
  const Scheduler chain = make_chain(optimizer);
  ChainedScheduler other({std::make_shared<StepLR>(optimizer, 3)});
  expect_error([&] { load(other, saved(*chain)); },
               "expected the archive's scheduler to be ChainedScheduler(StepLR), got "
               "ChainedScheduler(ConstantLR, StepLR).");
}

/// The second scheduler's state is wrong: the first one's must not have been replaced.
TEST(LRSchedulerState, ALoadOfManyIsAllOrNothing) {
  auto optimizer = two_groups();
  const Scheduler chain = make_chain(optimizer);
  chain->step();
  const LRSchedulerState saved_state = chain->state_dict();
  chain->step();
  LRSchedulerState damaged = saved_state;
  EXPECT_EQ(damaged["_schedulers"].toListRef()[1].toGenericDict().erase("gamma"), 1U);
  expect_error([&] { chain->load_state_dict(damaged); },
               "ChainedScheduler.load_state_dict: _schedulers[1], StepLR: expected the state to "
               "hold 'gamma', got none.");
  EXPECT_EQ(chain->last_epoch(), 2);
}

TEST(LRSchedulerState, TheMomentumIsThatOfTheOptimizer) {
  auto optimizer = two_groups();
  CyclicLR scheduler(optimizer, CyclicLROptions(0.1, 0.5));
  auto other = two_groups();
  CyclicLR without(other, CyclicLROptions(0.1, 0.5).cycle_momentum(false));
  expect_error([&] { load(without, saved(scheduler)); },
               "CyclicLR.load: expected the state's cycle_momentum to be false as in this "
               "scheduler, got true. Construct the scheduler with the saved scheduler's options.");
}

}  // namespace
}  // namespace torchfuse::testing
