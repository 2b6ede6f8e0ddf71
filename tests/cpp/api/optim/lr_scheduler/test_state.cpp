// SPDX-License-Identifier: BSD-3-Clause
// States of schedulers: saved, loaded, and refused with nothing changed.
#include <torchfuse/optim/lr_scheduler/chained_scheduler.h>
#include <torchfuse/optim/lr_scheduler/cosine_annealing_lr.h>
#include <torchfuse/optim/lr_scheduler/cyclic_lr.h>
#include <torchfuse/optim/lr_scheduler/lambda_lr.h>
#include <torchfuse/optim/lr_scheduler/linear_lr.h>
#include <torchfuse/optim/lr_scheduler/one_cycle_lr.h>
#include <torchfuse/optim/lr_scheduler/reduce_lr_on_plateau.h>
#include <torchfuse/optim/lr_scheduler/sequential_lr.h>
#include <torchfuse/optim/lr_scheduler/step_lr.h>

#include "scheduler_testing.h"

namespace torchfuse::testing {
namespace {

using namespace optim;  // NOLINT(google-build-using-namespace): all schedulers
using Scheduler = std::shared_ptr<LRScheduler>;

template <class Class, class... Arguments>
auto maker(Arguments... arguments) {
  return [=](torch::optim::Optimizer& optimizer) -> Scheduler {
    return std::make_shared<Class>(optimizer, arguments...);
  };
}

Scheduler make_sequential(torch::optim::Optimizer& optimizer) {
  return std::make_shared<SequentialLR>(
      optimizer,
      std::vector<Scheduler>{std::make_shared<LinearLR>(optimizer, 0.1),
                             std::make_shared<StepLR>(optimizer, 2)},
      std::vector<std::int64_t>{4});
}

Scheduler make_chain(torch::optim::Optimizer& optimizer) {
  return std::make_shared<ChainedScheduler>(
      std::vector<Scheduler>{maker<ConstantLR>()(optimizer), maker<StepLR>(3)(optimizer)});
}

TEST(LRSchedulerState, EverySchedulerGoesOnWhereItWasSaved) {
  const auto rising = [](std::int64_t epoch) { return 1.0 + 0.1 * static_cast<double>(epoch); };
  expect_resumes(maker<LambdaLR>(rising), 7, 20);
  expect_resumes(maker<MultiplicativeLR>(rising), 7, 20);
  expect_resumes(maker<StepLR>(3), 7, 20);
  expect_resumes(maker<MultiStepLR>(std::vector<std::int64_t>{4, 9, 9}), 7, 20);
  expect_resumes(maker<ExponentialLR>(0.9), 7, 20);
  expect_resumes(maker<ConstantLR>(0.1, 9), 7, 20);
  expect_resumes(maker<LinearLR>(0.1, 1.0, 9), 7, 20);
  expect_resumes(maker<PolynomialLR>(9, 2.0), 7, 20);
  expect_resumes(maker<CosineAnnealingLR>(9), 7, 20);
  expect_resumes(maker<CosineAnnealingWarmRestarts>(4, 2), 7, 20);
  expect_resumes(maker<CyclicLR>(CyclicLROptions(0.1, 0.5).step_size_up(3)), 7, 20);
  expect_resumes(maker<OneCycleLR>(OneCycleLROptions(0.5).total_steps(27)), 7, 20);
  expect_resumes(make_sequential, 7, 20);
  expect_resumes(make_sequential, 2, 20);
  expect_resumes(make_chain, 7, 20);
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
  refuses(
      "gamma", {},
      "expected the state to hold 'gamma', got one without it. Load what this class has saved.");
  refuses("gamma", "0.1", "expected the state's gamma to be finite and at least 0, got 0.1.");
  refuses("gamma", -1.0, "expected the state's gamma to be finite and at least 0, got -1.");
  refuses("last_epoch", -2,
          "expected the state's last_epoch to be an integer of at least -1, got -2.");
  refuses("base_lrs", std::vector<double>{0.5},
          "expected the state's base_lrs to be 2 numbers, one for each parameter group, got [0.5]. "
          "Load it for an optimizer with as many groups.");
  refuses("base_lrs", std::vector<double>{0.1, std::nan("")},
          "expected the state's base_lrs to be finite numbers, got nan.");
}

TEST(LRSchedulerState, RefusesArchivesOfOthers) {
  auto optimizer = two_groups();
  StepLR scheduler(optimizer, 2);
  expect_error([&] { load(scheduler, saved(ExponentialLR(optimizer, 0.5))); },
               "StepLR.load: expected the archive's scheduler to be StepLR, got ExponentialLR. "
               "Load what torch::save wrote of this class.");
  expect_error([&] { load(scheduler, saved(optimizer)); },
               "StepLR.load: expected the archive to hold format, got an archive without it. Load "
               "what torch::save wrote of a scheduler.");
  torch::serialize::OutputArchive later;
  later.write("format", c10::IValue("torchfuse.optim.lr_scheduler.2"));
  torch::serialize::InputArchive archive = reopened(later);
  expect_error([&] { scheduler.load(archive); },
               "StepLR.load: expected the archive's format to be torchfuse.optim.lr_scheduler.1, "
               "got torchfuse.optim.lr_scheduler.2.");
  const Scheduler chain = make_chain(optimizer);
  expect_error([&] { load(*make_sequential(optimizer), saved(*chain)); },
               "expected the archive's scheduler to be SequentialLR(LinearLR, StepLR), got "
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
               "hold 'gamma', got one without it.");
  EXPECT_EQ(chain->last_epoch(), 2);
}

TEST(LRSchedulerState, TheMomentumIsThatOfTheOptimizer) {
  auto optimizer = two_groups();
  CyclicLR scheduler(optimizer, CyclicLROptions(0.1, 0.5));
  auto other = two_groups();
  CyclicLR without(other, CyclicLROptions(0.1, 0.5).cycle_momentum(false));
  expect_error([&] { load(without, saved(scheduler)); },
               "CyclicLR.load: expected the state's cycle_momentum to be false as in this "
               "scheduler, got true. Construct the scheduler as the saved one was.");
}

}  // namespace
}  // namespace torchfuse::testing
