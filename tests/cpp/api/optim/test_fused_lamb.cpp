// SPDX-License-Identifier: BSD-3-Clause
// FusedLAMB against the paper's formula in fp64; masters, errors.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include <torchfuse/amp/grad_scaler.h>
#include <torchfuse/optim/fused_lamb.h>

#include "optim_testing.h"

namespace torchfuse::optim {
namespace {

using testing::copy_of;
using testing::expect_close;
using testing::expect_equal;
using testing::expect_error;
using testing::make_params;
using testing::set_grads;
using testing::state_of;

/// LAMB in plain fp64 tensor operations.
class LAMBReference {
 public:
  LAMBReference(const std::vector<torch::Tensor>& params, FusedLAMBOptions options)
      : options_(std::move(options)) {
    for (const torch::Tensor& param : params) {
      params_.push_back(param.detach().to(torch::kDouble, false, /*copy=*/true));
      means_.push_back(torch::zeros_like(params_.back()));
      squares_.push_back(torch::zeros_like(params_.back()));
    }
  }

  const std::vector<torch::Tensor>& params() const { return params_; }

  void step(const std::vector<torch::Tensor>& grads) {
    ++steps_;
    for (std::size_t i = 0; i < params_.size(); ++i) {
      if (params_[i].numel() != 0) update(i, grads[i].to(torch::kDouble));
    }
  }

 private:
  void update(std::size_t i, torch::Tensor grad) {
    const auto [beta1, beta2] = options_.betas();
    const double decay = options_.weight_decay();
    if (!options_.adam_w_mode()) grad = grad + decay * params_[i];
    means_[i] = beta1 * means_[i] + (options_.grad_averaging() ? 1.0 - beta1 : 1.0) * grad;
    squares_[i] = beta2 * squares_[i] + (1.0 - beta2) * grad * grad;
    const double bias1 = options_.bias_correction() ? 1.0 - std::pow(beta1, steps_) : 1.0;
    const double bias2 = options_.bias_correction() ? 1.0 - std::pow(beta2, steps_) : 1.0;
    torch::Tensor change = means_[i] / bias1 / ((squares_[i] / bias2).sqrt() + options_.eps());
    if (options_.adam_w_mode()) change = change + decay * params_[i];
    double trust = 1.0;
    const double norm = params_[i].norm().item<double>();
    const double change_norm = change.norm().item<double>();
    if ((options_.use_nvlamb() || decay != 0.0) && norm != 0.0 && change_norm != 0.0) {
      const double highest =
          options_.max_trust_ratio().value_or(std::numeric_limits<double>::infinity());
      trust = std::clamp(norm / change_norm, options_.min_trust_ratio(), highest);
    }
    params_[i] = params_[i] - options_.lr() * trust * change;
  }

  FusedLAMBOptions options_;
  std::vector<torch::Tensor> params_;
  std::vector<torch::Tensor> means_;
  std::vector<torch::Tensor> squares_;
  int steps_ = 0;
};

std::vector<torch::Tensor> grads_of(const std::vector<torch::Tensor>& params) {
  std::vector<torch::Tensor> grads;
  for (const torch::Tensor& param : params) grads.push_back(param.grad());
  return grads;
}

class FusedLAMBFormula : public ::testing::TestWithParam<FusedLAMBOptions> {};

TEST_P(FusedLAMBFormula, HoldsOver100Steps) {
  const FusedLAMBOptions options = FusedLAMBOptions(GetParam()).max_grad_norm(std::nullopt);
  const auto params = make_params();
  LAMBReference reference(params, options);
  FusedLAMB optimizer(params, options);
  for (int step = 0; step < 100; ++step) {
    set_grads(params, static_cast<std::uint64_t>(step));
    optimizer.step();
    reference.step(grads_of(params));
  }
  expect_close(params, reference.params());
  EXPECT_EQ(state_of(optimizer, params[0]).step().item<float>(), 100.0f);
}

INSTANTIATE_TEST_SUITE_P(
    Modes, FusedLAMBFormula,
    ::testing::Values(FusedLAMBOptions(1e-3), FusedLAMBOptions(1e-3).weight_decay(0.0),
                      FusedLAMBOptions(1e-3).weight_decay(0.0).use_nvlamb(true),
                      FusedLAMBOptions(1e-3).adam_w_mode(false).bias_correction(false),
                      FusedLAMBOptions(1e-3).grad_averaging(false).betas({0.8, 0.95}),
                      FusedLAMBOptions(1e-3).min_trust_ratio(0.1).max_trust_ratio(0.5)));

TEST(FusedLAMB, AZeroTensorMovesByThePlainUpdate) {
  const std::vector<torch::Tensor> params{torch::zeros({5}).requires_grad_(true)};
  LAMBReference reference(params, FusedLAMBOptions(0.1));
  FusedLAMB optimizer(params, FusedLAMBOptions(0.1).max_grad_norm(std::nullopt));
  set_grads(params, 1);
  optimizer.step();
  reference.step(grads_of(params));
  expect_close(params, reference.params());
  EXPECT_GT(params[0].abs().min().item<float>(), 0.05f);
}

TEST(FusedLAMB, MastersKeepWhatBFloat16Loses) {
  const auto params = make_params(torch::kBFloat16);
  LAMBReference reference(params, FusedLAMBOptions(1e-3));
  FusedLAMB optimizer(params,
                      FusedLAMBOptions(1e-3).master_weights(true).max_grad_norm(std::nullopt));
  for (int step = 0; step < 20; ++step) {
    set_grads(params, static_cast<std::uint64_t>(step));
    optimizer.step();
    reference.step(grads_of(params));
  }
  for (std::size_t i = 0; i < params.size(); ++i) {
    const torch::Tensor& master = state_of(optimizer, params[i]).master_param();
    expect_close(master, reference.params()[i]);
    EXPECT_TRUE(torch::equal(params[i], master.to(torch::kBFloat16)));
  }
}

TEST(FusedLAMB, AScalerSkipsAStepThatOverflowed) {
  const auto params = make_params();
  const auto before = copy_of(params);
  FusedLAMB optimizer(params, FusedLAMBOptions(0.1));
  amp::GradScaler scaler(torch::kCPU);
  scaler.scale(torch::ones({}));
  set_grads(params, 0);
  params[3].mutable_grad()[7] = std::numeric_limits<float>::infinity();
  scaler.step(optimizer);
  scaler.update();
  expect_equal(params, before);
  EXPECT_EQ(state_of(optimizer, params[0]).step().item<float>(), 0.0f);
}

TEST(FusedLAMB, OptionsOutOfRangeAreRefused) {
  const auto params = make_params();
  const auto refuse = [&](FusedLAMBOptions options, const std::string& text) {
    expect_error([&] { FusedLAMB optimizer(params, options); }, text);
  };
  refuse(FusedLAMBOptions().betas({0.9, 1.0}),
         "expected defaults.betas[1] to be at least 0 and less than 1, got 1");
  refuse(FusedLAMBOptions().min_trust_ratio(-0.5), "expected defaults.min_trust_ratio to be");
  refuse(FusedLAMBOptions().min_trust_ratio(2.0).max_trust_ratio(1.0),
         "expected defaults.max_trust_ratio to be none or at least min_trust_ratio, 2, got 1");
}

}  // namespace
}  // namespace torchfuse::optim
