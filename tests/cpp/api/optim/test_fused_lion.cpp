// SPDX-License-Identifier: BSD-3-Clause
// FusedLion against the formula; errors.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <vector>

#include <torchfuse/optim/fused_lion.h>

#include "optim_testing.h"

namespace torchfuse::optim {
namespace {

using testing::expect_close;
using testing::expect_error;
using testing::make_params;
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

TEST(FusedLion, OptionsOutOfRangeAreRefused) {
  const auto params = make_params();
  expect_error([&] { FusedLion optimizer(params, FusedLionOptions().betas({1.0, 0.9})); },
               "FusedLion: expected defaults.betas[0] to be at least 0 and less than 1, got 1");
}

}  // namespace
}  // namespace torchfuse::optim
