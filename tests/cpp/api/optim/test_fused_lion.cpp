// SPDX-License-Identifier: BSD-3-Clause
// FusedLion against the formula; archives, errors.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sstream>
#include <vector>

#include <torchfuse/optim/fused_lion.h>

#include "optim_testing.h"

namespace torchfuse::optim {
namespace {

using testing::copy_of;
using testing::expect_close;
using testing::expect_equal;
using testing::expect_error;
using testing::make_params;
using testing::run_steps;
using testing::set_grads;

TEST(FusedLion, MatchesTheFormulaOver100Steps) {
  const auto params = make_params();
  std::vector<torch::Tensor> expected;
  std::vector<torch::Tensor> momenta;
  for (const torch::Tensor& param : params) {
    expected.push_back(param.detach().to(torch::kDouble));
    momenta.push_back(torch::zeros_like(expected.back()));
  }
  FusedLion optimizer(params, FusedLionOptions(1e-3).weight_decay(0.1));
  for (int step = 0; step < 100; ++step) {
    set_grads(params, static_cast<std::uint64_t>(step));
    optimizer.step();
    for (std::size_t i = 0; i < params.size(); ++i) {
      const torch::Tensor grad = params[i].grad().to(torch::kDouble);
      const torch::Tensor direction = (0.9 * momenta[i] + 0.1 * grad).sign();
      momenta[i] = 0.99 * momenta[i] + 0.01 * grad;
      expected[i] = expected[i] - 1e-3 * (0.1 * expected[i] + direction);
    }
  }
  expect_close(params, expected);
}

TEST(FusedLion, ASavedRunGoesOnWithTheSameBits) {
  const auto params = make_params();
  FusedLion optimizer(params, FusedLionOptions(2e-3).betas({0.8, 0.95}).maximize(true));
  run_steps(optimizer, params, 0, 3);
  std::stringstream stream;
  torch::save(optimizer, stream);
  const auto loaded_params = copy_of(params);
  FusedLion loaded(loaded_params, FusedLionOptions(1.0));
  torch::load(loaded, stream);
  run_steps(optimizer, params, 3, 6);
  run_steps(loaded, loaded_params, 3, 6);
  expect_equal(loaded_params, params);
}

TEST(FusedLion, OptionsOutOfRangeAreRefused) {
  const auto params = make_params();
  expect_error([&] { FusedLion optimizer(params, FusedLionOptions(-1.0)); },
               "FusedLion: expected defaults.lr to be a finite number >= 0");
  expect_error([&] { FusedLion optimizer(params, FusedLionOptions().betas({1.0, 0.9})); },
               "FusedLion: expected defaults.betas[0] to be in [0, 1), got 1");
}

}  // namespace
}  // namespace torchfuse::optim
