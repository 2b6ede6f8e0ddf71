// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/torch.h>
#include <torchfuse/amp/grad_scaler.h>
#include <torchfuse/clip_grad.h>
#include <torchfuse/optim/fused_adam.h>

#include <cmath>
#include <limits>
#include <vector>

#include "optim/optim_testing.h"

namespace torchfuse::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

torch::Tensor with_grad(const torch::Tensor& grad) {
  torch::Tensor param = torch::zeros(grad.sizes(), grad.options()).requires_grad_(true);
  param.mutable_grad() = grad;
  return param;
}

/// Parameters with gradients, one without, and copies of them.
struct Problem {
  explicit Problem(torch::ScalarType dtype = torch::kFloat)
      : params(make_params(dtype)), expected(copy_of(params)) {
    set_grads(params, 3);
    set_grads(expected, 3);
    for (auto* list : {&params, &expected}) list->push_back(torch::ones(3).requires_grad_(true));
  }

  void expect_same_grads() const {
    for (std::size_t i = 0; i + 1 < params.size(); ++i) {
      SCOPED_TRACE("gradient " + std::to_string(i));
      EXPECT_TRUE(torch::allclose(params[i].grad(), expected[i].grad(), 2e-6, 1e-12));
    }
    EXPECT_FALSE(params.back().grad().defined());
  }

  std::vector<torch::Tensor> params;
  std::vector<torch::Tensor> expected;
};

TEST(ClipGradNorm, EqualsTorch) {
  // No infinite norm: torch refuses tensors without elements there.
  for (const double norm_type : {2.0, 1.0, 0.5}) {
    for (const double max_norm : {0.0, 0.7, 1e6, kInfinity}) {
      SCOPED_TRACE(std::to_string(norm_type) + " " + std::to_string(max_norm));
      for (const torch::ScalarType dtype : {torch::kFloat, torch::kDouble}) {
        const Problem problem(dtype);
        const double expected =
            torch::nn::utils::clip_grad_norm_(problem.expected, max_norm, norm_type);
        const torch::Tensor norm = clip_grad_norm_(problem.params, max_norm, norm_type);
        EXPECT_EQ(norm.dim(), 0);
        EXPECT_EQ(norm.scalar_type(), dtype);
        const double tolerance = dtype == torch::kDouble ? 1e-14 : 1e-5;
        EXPECT_NEAR(norm.item<double>(), expected, tolerance * expected);
        problem.expect_same_grads();
      }
    }
  }
}

TEST(ClipGradNorm, TakesTheLargestMagnitude) {
  const Problem problem(torch::kBFloat16);
  double largest = 0.0;
  for (const torch::Tensor& param : problem.params) {
    if (!param.grad().defined() || param.numel() == 0) continue;
    largest = std::max(largest, param.grad().abs().max().item<double>());
  }
  const torch::Tensor norm = clip_grad_norm_(problem.params, 0.5, kInfinity);
  EXPECT_EQ(norm.item<double>(), largest);
  for (const torch::Tensor& param : problem.params) {
    if (param.grad().defined() && param.numel() > 0) {
      EXPECT_LE(param.grad().abs().max().item<double>(), 0.5);
    }
  }
}

TEST(ClipGradNorm, MixesTypesAndTakesOneTensorOrSome) {
  const torch::Tensor half = with_grad(torch::full({2}, 3.0, torch::kHalf));
  const torch::Tensor wide = with_grad(torch::full({2}, 4.0, torch::kDouble));
  const torch::Tensor norm = clip_grad_norm_({half, wide}, 1.0);
  EXPECT_EQ(norm.scalar_type(), torch::kDouble);
  EXPECT_NEAR(norm.item<double>(), std::sqrt(50.0), 1e-6);
  EXPECT_EQ(half.grad().scalar_type(), torch::kHalf);
  EXPECT_NEAR(half.grad()[0].item<double>(), 3.0 / std::sqrt(50.0), 3e-4);
  EXPECT_NEAR(wide.grad()[0].item<double>(), 4.0 / std::sqrt(50.0), 1e-7);

  const torch::Tensor alone = with_grad(torch::tensor({3.0f, 4.0f}));
  EXPECT_EQ(clip_grad_norm_({alone}, kInfinity).item<float>(), 5.0f);
  EXPECT_EQ(clip_grad_norm_(alone, 1.0).item<float>(), 5.0f);
  EXPECT_NEAR(alone.grad()[1].item<float>(), 0.8f, 1e-6);
}

TEST(ClipGradNorm, WithoutGradientsIsZero) {
  const std::vector<torch::Tensor> params = make_params();
  EXPECT_EQ(clip_grad_norm_(params, 1.0).item<float>(), 0.0f);
  EXPECT_EQ(clip_grad_norm_(std::vector<torch::Tensor>{}, 1.0).item<float>(), 0.0f);
  clip_grad_value_(params, 1.0);
}

TEST(ClipGradNorm, ReportsANormThatIsNotFiniteOnRequestOnly) {
  for (const double value : {kInfinity, std::nan("")}) {
    const torch::Tensor param = with_grad(torch::tensor({1.0, value}, torch::kFloat));
    const torch::Tensor before = param.grad().clone();
    expect_error([&] { clip_grad_norm_(param, 1.0, 2.0, /*error_if_nonfinite=*/true); },
                 "The total norm of order 2 for gradients from `parameters` is non-finite, so it "
                 "cannot be clipped.");
    EXPECT_TRUE(torch::allclose(param.grad(), before, 0.0, 0.0, /*equal_nan=*/true));
    const torch::Tensor expected = with_grad(before.clone());
    torch::nn::utils::clip_grad_norm_(expected, 1.0);
    const torch::Tensor norm = clip_grad_norm_(param, 1.0);
    EXPECT_EQ(std::isnan(norm.item<double>()), std::isnan(value));
    EXPECT_TRUE(torch::allclose(param.grad(), expected.grad(), 0.0, 0.0, /*equal_nan=*/true));
  }
}

TEST(ClipGradNorm, EqualsTheStepThatClips) {
  for (const bool scaled : {false, true}) {
    const auto params = make_params();
    const auto folded = copy_of(params);
    optim::FusedAdam optimizer(params, optim::FusedAdamOptions(2e-3));
    optim::FusedAdam clipping(folded, optim::FusedAdamOptions(2e-3).max_grad_norm(0.5));
    amp::GradScaler scaler(torch::kCPU,
                           amp::GradScalerOptions().init_scale(1024.0).enabled(scaled));
    for (int i = 0; i < 5; ++i) {
      for (const auto* list : {&params, &folded}) {
        set_grads(*list, i);
        for (const torch::Tensor& param : *list) param.grad().mul_(scaled ? 1024.0 : 1.0);
      }
      scaler.scale(torch::zeros({}));
      scaler.unscale_(optimizer);
      const torch::Tensor norm = clip_grad_norm_(params, 0.5);
      scaler.step(optimizer);
      scaler.step(clipping);
      scaler.update();
      EXPECT_TRUE(torch::equal(clipping.grad_norm(), norm));
      EXPECT_GT(norm.item<double>(), 0.5);
    }
    expect_close(folded, params);
  }
}

TEST(ClipGradNorm, RefusesBadInput) {
  const torch::Tensor param = with_grad(torch::ones(2));
  expect_error([&] { clip_grad_norm_(param, -1.0); },
               "clip_grad_norm_: expected max_norm to be at least 0, got -1. Use infinity to "
               "measure only.");
  expect_error([&] { clip_grad_norm_(param, std::nan("")); }, "max_norm to be at least 0, got nan");
  expect_error([&] { clip_grad_norm_(param, 1.0, std::nan("")); },
               "clip_grad_norm_: expected norm_type to be a number, got nan. Use 2 or infinity.");
  expect_error([&] { clip_grad_norm_({param, torch::Tensor()}, 1.0); },
               "clip_grad_norm_: expected parameters[1] to be a tensor, got an undefined one. "
               "Leave it out.");
  const torch::Tensor sparse = torch::zeros({3, 2}).requires_grad_(true);
  sparse.mutable_grad() = torch::ones({3, 2}).to_sparse();
  expect_error(
      [&] { clip_grad_norm_({param, sparse}, 1.0); },
      "clip_grad_norm_: expected the gradient of parameters[1] to be dense, got one of layout "
      "Sparse. Leave the parameter out, or use a layer without sparse=True.");
  expect_error(
      [&] { clip_grad_value_({param, sparse}, 1.0); },
      "clip_grad_value_: expected the gradient of parameters[1] to be dense, got one of layout "
      "Sparse.");
  expect_error(
      [&] { clip_grad_value_(param, -0.5); },
      "clip_grad_value_: expected clip_value to be at least 0, got -0.5. Gradients are clamped "
      "to [-clip_value, clip_value].");
  expect_error(
      [&] { get_total_norm({param}, 2.0, {{}, {}}); },
      "clip_grad_norm_: expected shard_groups to have one entry for each of the 1 tensors, "
      "got 2. Leave shard_groups empty if no tensor is sharded.");
  expect_error([&] { clip_with_norm_({param}, 1.0, torch::ones(2)); },
               "clip_grad_norm_: expected total_norm to be a tensor of 1 element, got sizes [2]. "
               "Pass the result of get_total_norm().");
  EXPECT_TRUE(torch::equal(param.grad(), torch::ones(2)));
}

TEST(ClipGradNorm, DoesItsPartsByThemselves) {
  const torch::Tensor a = torch::tensor({3.0f}), b = torch::tensor({4.0f});
  const torch::Tensor norm = get_total_norm({a, torch::Tensor(), b});
  EXPECT_EQ(norm.item<float>(), 5.0f);
  clip_with_norm_({a, torch::Tensor(), b}, 1.0, norm * 2);
  EXPECT_NEAR(a.item<float>(), 0.3f, 1e-6);
  EXPECT_NEAR(b.item<float>(), 0.4f, 1e-6);
}

TEST(ClipGradValue, EqualsTorch) {
  for (const double clip_value : {0.0, 0.3, 100.0}) {
    for (const torch::ScalarType dtype : {torch::kFloat, torch::kHalf, torch::kDouble}) {
      const Problem problem(dtype);
      problem.params[3].grad()[5] = std::nan("");
      problem.expected[3].grad()[5] = std::nan("");
      torch::nn::utils::clip_grad_value_(problem.expected, clip_value);
      clip_grad_value_(problem.params, clip_value);
      for (std::size_t i = 0; i + 1 < problem.params.size(); ++i) {
        EXPECT_TRUE(torch::allclose(problem.params[i].grad(), problem.expected[i].grad(), 0.0, 0.0,
                                    /*equal_nan=*/true));
      }
    }
  }
}

}  // namespace
}  // namespace torchfuse::testing
