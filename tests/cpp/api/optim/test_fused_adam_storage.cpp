// SPDX-License-Identifier: BSD-3-Clause
// Storage options in numbers, with FusedAdam; test_storage_options.cpp is about all classes.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <vector>

#include <torchfuse/masters.h>
#include <torchfuse/optim/fused_adam.h>

#include "optim_testing.h"

namespace torchfuse::optim {
namespace {

using testing::copy_of;
using testing::expect_equal;
using testing::expect_error;
using testing::make_params;
using testing::run_steps;
using testing::state_of;

TEST(FusedAdamStorage, AStepRoundsItsMomentsOnce) {
  const auto params = make_params();
  const auto copies = copy_of(params);
  FusedAdam narrow(params, FusedAdamOptions(1e-2).exp_avg_dtype(torch::kBFloat16));
  FusedAdam wide(copies, FusedAdamOptions(1e-2));
  run_steps(narrow, params, 0, 1);
  run_steps(wide, copies, 0, 1);
  expect_equal(params, copies);
  for (std::size_t i = 0; i < params.size(); ++i) {
    EXPECT_TRUE(torch::equal(state_of(narrow, params[i]).exp_avg(),
                             state_of(wide, copies[i]).exp_avg().to(torch::kBFloat16)));
    EXPECT_TRUE(torch::equal(state_of(narrow, params[i]).exp_avg_sq(),
                             state_of(wide, copies[i]).exp_avg_sq()));
  }
}

TEST(FusedAdamStorage, StochasticRoundingKeepsTheMean) {
  const auto start = torch::ones({1 << 18}, torch::kBFloat16);
  const auto param = start.clone().requires_grad_(true);
  FusedAdam optimizer(std::vector<torch::Tensor>{param},
                      FusedAdamOptions(0x1p-12).eps(0.0).stochastic_rounding(true));
  for (int step = 0; step < 8; ++step) {
    param.mutable_grad() = torch::ones_like(param);
    optimizer.step();
  }
  // Eight times 2^-8 with the chance 1/16.
  const double deviation = 0x1p-8 * std::sqrt(8.0 / 16.0 / (1 << 18));
  EXPECT_NEAR(param.detach().to(torch::kDouble).mean().item<double>(), 1.0 - 8 * 0x1p-12,
              5 * deviation);
}

TEST(FusedAdamStorage, RemaindersAndMastersConvertExactly) {
  const torch::Tensor masters = torch::randn({4096});
  const torch::Tensor remainder = remainder_of_master(masters);
  EXPECT_TRUE(torch::equal(master_of_remainder(masters.to(torch::kBFloat16), remainder), masters));
  // Halfway between two parameters, the even one of which is nearer to zero: one unit is lost.
  const torch::Tensor tie = torch::full({1}, 1.0 + 0x1p-8);
  EXPECT_EQ(remainder_of_master(tie).item<int>(), 32767);
  expect_error([&] { master_of_remainder(masters, remainder); },
               "expected param to be of dtype bfloat16, got Float");
  expect_error([&] { remainder_of_master(remainder); },
               "expected master to be of dtype float32, got Short");
}

}  // namespace
}  // namespace torchfuse::optim
