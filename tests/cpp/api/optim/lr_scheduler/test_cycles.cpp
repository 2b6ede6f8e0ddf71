// SPDX-License-Identifier: BSD-3-Clause
// CyclicLR and OneCycleLR: rates and momenta.
#include <torchfuse/optim/fused_adagrad.h>
#include <torchfuse/optim/fused_adam.h>
#include <torchfuse/optim/fused_lamb.h>
#include <torchfuse/optim/fused_lars.h>
#include <torchfuse/optim/fused_lion.h>
#include <torchfuse/optim/fused_novograd.h>
#include <torchfuse/optim/fused_sgd.h>
#include <torchfuse/optim/lr_scheduler/cyclic_lr.h>
#include <torchfuse/optim/lr_scheduler/one_cycle_lr.h>

#include <tuple>

#include "scheduler_testing.h"

namespace torchfuse::testing {
namespace {

using namespace optim;  // NOLINT(google-build-using-namespace): all optimizers

template <class Options>
double momentum_of(torch::optim::Optimizer& optimizer, std::size_t group) {
  auto& options = static_cast<Options&>(optimizer.param_groups()[group].options());
  if constexpr (requires { options.betas(); }) {
    return std::get<0>(options.betas());
  } else {
    return options.momentum();
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
  expect_cycles<FusedNovoGrad, FusedNovoGradOptions>();
  expect_cycles<FusedSGD, FusedSGDOptions>();
  expect_cycles<torch::optim::Adam, torch::optim::AdamOptions>();
  expect_cycles<torch::optim::AdamW, torch::optim::AdamWOptions>();
  expect_cycles<torch::optim::RMSprop, torch::optim::RMSpropOptions>();
  expect_cycles<torch::optim::SGD, torch::optim::SGDOptions>();
}

TEST(CyclicLR, KeepsTheSecondBeta) {
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
        "CyclicLR: expected options with momentum or betas in group 0, of FusedAdam, "
        "FusedLAMB, FusedLARS, FusedLion, FusedNovoGrad, FusedSGD, or torch's Adam, AdamW, "
        "RMSprop or SGD, got others. Use cycle_momentum(false).");
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

TEST(OneCycleLR, GoesUpAndDownOnce) {
  auto optimizer = two_groups();
  OneCycleLR scheduler(optimizer, OneCycleLROptions(std::vector<double>{1.0, 0.5})
                                      .total_steps(21)
                                      .pct_start(11.0 / 21.0)
                                      .div_factor(10.0)
                                      .final_div_factor(100.0));
  expect_rates(rates_of(optimizer), {0.1, 0.05});
  EXPECT_NEAR(momentum_of<torch::optim::SGDOptions>(optimizer, 0), 0.95, 1e-14);
  for (int step = 0; step < 10; ++step) scheduler.step();
  expect_rates(rates_of(optimizer), {1.0, 0.5});
  EXPECT_NEAR(momentum_of<torch::optim::SGDOptions>(optimizer, 0), 0.85, 1e-14);
  for (int step = 10; step < 20; ++step) scheduler.step();
  expect_rates(rates_of(optimizer), {0.001, 0.0005});
  EXPECT_NEAR(momentum_of<torch::optim::SGDOptions>(optimizer, 0), 0.95, 1e-14);
}

TEST(OneCycleLR, EndsAfterItsSteps) {
  auto optimizer = two_groups();
  OneCycleLR scheduler(optimizer, OneCycleLROptions(1.0).epochs(2).steps_per_epoch(2));
  for (int step = 0; step < 4; ++step) scheduler.step();
  const Rates last = rates_of(optimizer);
  expect_error([&] { scheduler.step(); },
               "OneCycleLR.step: expected at most 4 steps, as total_steps says, got step 5.");
  EXPECT_EQ(rates_of(optimizer), last);
  EXPECT_EQ(scheduler.last_epoch(), 4);
}

}  // namespace
}  // namespace torchfuse::testing
