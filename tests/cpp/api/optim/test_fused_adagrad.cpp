// SPDX-License-Identifier: BSD-3-Clause
// FusedAdagrad against torch::optim::Adagrad and its formula; errors.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <tuple>

#include <torchfuse/optim/fused_adagrad.h>

#include "optim_testing.h"

namespace torchfuse::optim {
namespace {

using testing::copy_of;
using testing::expect_close;
using testing::expect_error;
using testing::make_params;
using testing::run_steps;
using testing::set_grads;
using testing::state_of;

/// lr_decay, initial_accumulator_value, dtype
using AdagradCase = std::tuple<double, double, torch::ScalarType>;

class FusedAdagradParity : public ::testing::TestWithParam<AdagradCase> {};

TEST_P(FusedAdagradParity, MatchesTorchOver100Steps) {
  const auto [lr_decay, initial, dtype] = GetParam();
  const auto params = make_params(dtype);
  const auto expected = copy_of(params);
  FusedAdagrad optimizer(
      params,
      FusedAdagradOptions(1e-3).lr_decay(lr_decay).initial_accumulator_value(initial).weight_decay(
          0.05));
  torch::optim::Adagrad reference(expected, torch::optim::AdagradOptions(1e-3)
                                                .lr_decay(lr_decay)
                                                .initial_accumulator_value(initial)
                                                .weight_decay(0.05));
  run_steps(optimizer, params, 0, 100);
  run_steps(reference, expected, 0, 100);
  expect_close(params, expected);
  EXPECT_EQ(state_of(optimizer, params[0]).step().item<float>(), 100.0f);
}

INSTANTIATE_TEST_SUITE_P(Modes, FusedAdagradParity,
                         ::testing::Combine(::testing::Values(0.0, 0.01),
                                            ::testing::Values(0.0, 0.5),
                                            ::testing::Values(torch::kFloat, torch::kDouble)));

TEST(FusedAdagrad, DecoupledDecayAndMaximizeMatchTheFormula) {
  const auto params = make_params();
  FusedAdagrad optimizer(
      params, FusedAdagradOptions(1e-3).weight_decay(0.05).adagrad_w_mode(true).maximize(true));
  const torch::NoGradGuard no_grad;
  torch::Tensor p = params[0].detach().to(torch::kDouble);
  torch::Tensor s = torch::zeros_like(p);
  for (int i = 0; i < 100; ++i) {
    set_grads(params, i);
    const torch::Tensor g = -params[0].grad().to(torch::kDouble);
    s = s + g * g;
    p = p - 1e-3 * (g / (s.sqrt() + 1e-10) + 0.05 * p);
    optimizer.step();
  }
  expect_close(params[0], p);
}

TEST(FusedAdagrad, ASkippedFirstStepLeavesTheInitialSums) {
  const auto params = make_params();
  FusedAdagrad optimizer(
      params, FusedAdagradOptions(1e-3).initial_accumulator_value(0.5).skip_non_finite(true));
  set_grads(params, 0);
  params[4].grad().view(-1)[209] = std::numeric_limits<float>::infinity();
  optimizer.step();
  EXPECT_EQ(optimizer.last_step_skipped().item<float>(), 1.0f);
  EXPECT_TRUE(torch::equal(state_of(optimizer, params[0]).sum(), torch::full({37, 5}, 0.5f)));
}

TEST(FusedAdagradOptions, OutOfRangeValuesAreRefusedByName) {
  using Options = FusedAdagradOptions;
  const auto construct = [](const Options& options) {
    return [options] { FusedAdagrad optimizer(make_params(), options); };
  };
  expect_error(construct(Options().lr_decay(-0.1)),
               "defaults.lr_decay to be at least 0 and finite");
  expect_error(construct(Options().eps(-1e-8)), "defaults.eps to be at least 0 and finite");
  expect_error(construct(Options().initial_accumulator_value(-0.5)),
               "defaults.initial_accumulator_value to be at least 0 and finite, got -0.5");
}

}  // namespace
}  // namespace torchfuse::optim
