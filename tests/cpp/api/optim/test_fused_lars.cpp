// SPDX-License-Identifier: BSD-3-Clause
// FusedLARS against its formula in fp64; errors.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <vector>

#include <torchfuse/optim/fused_lars.h>

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
using testing::state_of;

/// One tensor in fp64.
struct LARSReference {
  torch::Tensor param, buffer;

  void update(const FusedLARSOptions& options, const torch::Tensor& grad) {
    const double size = param.norm().item<double>();
    const double slope = grad.norm().item<double>();
    double rate = options.lr();
    if (size != 0.0 && slope != 0.0) {
      rate *= options.trust_coefficient() * size /
              (slope + options.weight_decay() * size + options.eps());
    }
    const torch::Tensor change =
        rate * ((options.maximize() ? -grad : grad) + options.weight_decay() * param);
    buffer = options.momentum() * buffer + change;
    param = param - (options.nesterov() ? change + options.momentum() * buffer : buffer);
  }
};

TEST(FusedLARS, FollowsTheFormulaOver100Steps) {
  std::vector<FusedLARSOptions> all{
      FusedLARSOptions(0.2).weight_decay(0.05),
      FusedLARSOptions(0.2).nesterov(true).maximize(true).eps(1.0),
      FusedLARSOptions(0.02).momentum(0.0).trust_coefficient(0.02).weight_decay(0.01)};
  for (FusedLARSOptions& options : all) {
    options.master_weights(true);
    for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kBFloat16}) {
      const auto params = make_params(dtype);
      FusedLARS optimizer(params, options);
      std::vector<LARSReference> references;
      for (const auto& param : params) {
        const torch::Tensor start = param.detach().to(torch::kDouble).clone();
        references.push_back({start, torch::zeros_like(start)});
      }
      for (int i = 0; i < 100; ++i) {
        set_grads(params, i);
        optimizer.step();
        for (std::size_t k = 0; k < params.size(); ++k) {
          references[k].update(options, params[k].grad().to(torch::kDouble));
        }
      }
      for (std::size_t k = 0; k < params.size(); ++k) {
        const torch::Tensor& master = state_of(optimizer, params[k]).master_param();
        ASSERT_EQ(master.defined(), dtype == torch::kBFloat16);
        expect_close(master.defined() ? master : params[k], references[k].param);
      }
    }
  }
}

TEST(FusedLARS, TheLocalRateIsOneWhereANormIsZero) {
  const torch::Tensor zeros = torch::zeros({5}).requires_grad_(true);
  const torch::Tensor ones = torch::ones({5}).requires_grad_(true);
  FusedLARS optimizer(std::vector<torch::Tensor>{zeros, ones},
                      FusedLARSOptions(0.5).weight_decay(0.25));
  zeros.mutable_grad() = torch::ones({5});
  ones.mutable_grad() = torch::zeros({5});
  optimizer.step();
  EXPECT_TRUE(torch::equal(zeros, torch::full({5}, -0.5)));
  EXPECT_TRUE(torch::equal(ones, torch::full({5}, 0.875)));
}

TEST(FusedLARS, ASkippedStepLeavesNoTrace) {
  const auto params = make_params();
  const auto expected = copy_of(params);
  FusedLARS optimizer(params, FusedLARSOptions(2.0).skip_non_finite(true));
  FusedLARS reference(expected, FusedLARSOptions(2.0));
  set_grads(params, 0);
  params[4].grad().view(-1)[209] = std::numeric_limits<float>::quiet_NaN();
  optimizer.step();
  EXPECT_EQ(optimizer.last_step_skipped().item<float>(), 1.0f);
  run_steps(optimizer, params, 1, 4);
  run_steps(reference, expected, 1, 4);
  expect_equal(params, expected);
}

TEST(FusedLARSOptions, OutOfRangeValuesAreRefusedByName) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto construct = [](const FusedLARSOptions& options) {
    return [options] { FusedLARS optimizer(make_params(), options); };
  };
  expect_error(construct(FusedLARSOptions().momentum(nan)),
               "defaults.momentum to be at least 0 and finite");
  expect_error(construct(FusedLARSOptions().trust_coefficient(-0.1)),
               "defaults.trust_coefficient to be");
  expect_error(construct(FusedLARSOptions().eps(-1.0)), "defaults.eps to be at least 0 and finite");
  expect_error(construct(FusedLARSOptions().momentum(0.0).nesterov(true)),
               "defaults.nesterov to come with a momentum above 0, got 0");
}

}  // namespace
}  // namespace torchfuse::optim
