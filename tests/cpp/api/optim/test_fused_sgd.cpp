// SPDX-License-Identifier: BSD-3-Clause
// FusedSGD against torch::optim::SGD; buffers that come late, errors.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <torchfuse/amp/grad_scaler.h>
#include <torchfuse/optim/fused_sgd.h>

#include "optim_testing.h"

namespace torchfuse::optim {
namespace {

using testing::copy_of;
using testing::expect_close;
using testing::expect_equal;
using testing::expect_error;
using testing::load;
using testing::make_params;
using testing::options_of;
using testing::run_steps;
using testing::saved;
using testing::set_grads;
using testing::state_of;

torch::optim::SGDOptions& options_of(torch::optim::SGD& optimizer) {
  return static_cast<torch::optim::SGDOptions&>(optimizer.param_groups()[0].options());
}

/// momentum, dampening, nesterov, dtype
using SGDCase = std::tuple<double, double, bool, torch::ScalarType>;

class FusedSGDParity : public ::testing::TestWithParam<SGDCase> {};

TEST_P(FusedSGDParity, MatchesTorchOver100Steps) {
  const auto [momentum, dampening, nesterov, dtype] = GetParam();
  const auto params = make_params(dtype);
  const auto expected = copy_of(params);
  FusedSGD optimizer(
      params,
      FusedSGDOptions(1e-3).momentum(momentum).dampening(dampening).nesterov(nesterov).weight_decay(
          0.05));
  torch::optim::SGD reference(expected, torch::optim::SGDOptions(1e-3)
                                            .momentum(momentum)
                                            .dampening(dampening)
                                            .nesterov(nesterov)
                                            .weight_decay(0.05));
  run_steps(optimizer, params, 0, 100);
  run_steps(reference, expected, 0, 100);
  expect_close(params, expected);
  EXPECT_EQ(state_of(optimizer, params[0]).step().item<float>(), 100.0f);
  EXPECT_EQ(state_of(optimizer, params[0]).momentum_buffer().defined(), momentum != 0.0);
}

INSTANTIATE_TEST_SUITE_P(Modes, FusedSGDParity,
                         ::testing::Values(SGDCase{0.0, 0.0, false, torch::kFloat},
                                           SGDCase{0.9, 0.0, false, torch::kFloat},
                                           SGDCase{0.9, 0.1, false, torch::kFloat},
                                           SGDCase{0.9, 0.0, true, torch::kFloat},
                                           SGDCase{0.9, 0.1, false, torch::kDouble}));

TEST(FusedSGD, DecayBehindTheMomentumAndMaximizeMatchTheFormula) {
  const auto params = make_params();
  FusedSGD optimizer(
      params,
      FusedSGDOptions(1e-3).momentum(0.9).weight_decay(0.05).wd_after_momentum(true).maximize(
          true));
  const torch::NoGradGuard no_grad;
  torch::Tensor p = params[0].detach().to(torch::kDouble);
  torch::Tensor b = torch::zeros_like(p);
  for (int i = 0; i < 100; ++i) {
    set_grads(params, i);
    b = 0.9 * b - params[0].grad().to(torch::kDouble);
    p = p - 1e-3 * (b + 0.05 * p);
    optimizer.step();
  }
  expect_close(params[0], p);
}

TEST(FusedSGD, MastersOf16BitParametersFollowFp64WithAndWithoutMomentum) {
  for (const double momentum : {0.0, 0.9}) {
    const auto params = make_params(torch::kBFloat16);
    std::vector<torch::Tensor> expected;
    for (const auto& param : params) {
      expected.push_back(param.detach().to(torch::kDouble).requires_grad_(true));
    }
    FusedSGD optimizer(params, FusedSGDOptions(2e-4).momentum(momentum).master_weights(true));
    torch::optim::SGD reference(expected, torch::optim::SGDOptions(2e-4).momentum(momentum));
    for (int i = 0; i < 100; ++i) {
      set_grads(params, i);
      for (std::size_t k = 0; k < params.size(); ++k) {
        expected[k].mutable_grad() = params[k].grad().to(torch::kDouble);
      }
      optimizer.step();
      reference.step();
    }
    for (std::size_t k = 0; k < params.size(); ++k) {
      const torch::Tensor& master = state_of(optimizer, params[k]).master_param();
      expect_close(master, expected[k]);
      EXPECT_TRUE(torch::equal(params[k], master.to(torch::kBFloat16)));
    }
  }
}

// Dampening shows which step is a buffer's first. torch::optim::SGD counts by the buffer, too.
TEST(FusedSGD, ABufferThatComesLateHasAFirstStepOfItsOwn) {
  const auto params = make_params();
  const auto expected = copy_of(params);
  FusedSGD optimizer(params, FusedSGDOptions(1e-3).dampening(0.5));
  torch::optim::SGD reference(expected, torch::optim::SGDOptions(1e-3).dampening(0.5));
  run_steps(optimizer, params, 0, 3);
  run_steps(reference, expected, 0, 3);
  EXPECT_FALSE(state_of(optimizer, params[0]).momentum_buffer().defined());
  for (const double momentum : {0.9, 0.0, 0.9}) {  // the last finds the buffer of the first
    options_of(optimizer).momentum(momentum);
    options_of(reference).momentum(momentum);
    run_steps(optimizer, params, 3, 6);
    run_steps(reference, expected, 3, 6);
    expect_close(params, expected);
  }
}

TEST(FusedSGD, ASkippedFirstStepIsNotTheFirst) {
  const auto params = make_params();
  const auto expected = copy_of(params);
  const FusedSGDOptions options = FusedSGDOptions(1e-3).momentum(0.9).dampening(0.5);
  FusedSGD optimizer(params, FusedSGDOptions(options).skip_non_finite(true));
  FusedSGD reference(expected, options);
  set_grads(params, 0);
  params[4].grad().view(-1)[209] = std::numeric_limits<float>::infinity();
  optimizer.step();
  EXPECT_EQ(optimizer.last_step_skipped().item<float>(), 1.0f);
  EXPECT_EQ(state_of(optimizer, params[0]).step().item<float>(), 0.0f);
  run_steps(optimizer, params, 1, 4);
  run_steps(reference, expected, 1, 4);
  expect_equal(params, expected);
}

TEST(FusedSGD, ALaterBufferHasAFirstUpdateAndLeavesTheCount) {
  const auto params = make_params();
  const auto expected = copy_of(params);
  const FusedSGDOptions options = FusedSGDOptions(1e-3).dampening(0.5);
  FusedSGD optimizer(params, FusedSGDOptions(options).skip_non_finite(true));
  torch::optim::SGD reference(expected, torch::optim::SGDOptions(1e-3).dampening(0.5));
  run_steps(optimizer, params, 0, 3);
  run_steps(reference, expected, 0, 3);
  options_of(optimizer).momentum(0.9);
  options_of(reference).momentum(0.9);
  set_grads(params, 0);
  params[4].grad().view(-1)[209] = std::numeric_limits<float>::infinity();
  optimizer.step();  // skipped, with a buffer
  const auto copies = copy_of(params);
  FusedSGD loaded(copies, options);
  load(loaded, saved(optimizer));
  for (FusedSGD* each : {&optimizer, &loaded}) {
    const auto& own = each == &loaded ? copies : params;
    run_steps(*each, own, 3, 6);
    EXPECT_EQ(state_of(*each, own[0]).step().item<float>(), 6.0f);
    EXPECT_EQ(state_of(*each, own[0]).momentum_start().item<float>(), 3.0f);
  }
  run_steps(reference, expected, 3, 6);
  expect_close(params, expected);
  expect_equal(params, copies);
}

TEST(FusedSGD, AMomentumThatPausesBeforeTheFirstUpdate) {
  const auto params = make_params();
  const auto expected = copy_of(params);
  FusedSGD optimizer(params, FusedSGDOptions(1e-3).dampening(0.5).skip_non_finite(true));
  torch::optim::SGD reference(expected, torch::optim::SGDOptions(1e-3).dampening(0.5));
  options_of(optimizer).momentum(0.9);
  set_grads(params, 0);
  params[4].grad().view(-1)[209] = std::numeric_limits<float>::infinity();
  optimizer.step();  // skipped, with a buffer
  for (const double momentum : {0.0, 0.9}) {
    options_of(optimizer).momentum(momentum);
    options_of(reference).momentum(momentum);
    run_steps(optimizer, params, 0, 2);
    run_steps(reference, expected, 0, 2);
  }
  expect_close(params, expected);
}

TEST(FusedSGD, ScaledAndClippedStepsEqualPlainOnes) {
  const auto params = make_params();
  const auto copies = copy_of(params);
  const FusedSGDOptions options = FusedSGDOptions(1e-2).momentum(0.9).max_grad_norm(1.0);
  FusedSGD optimizer(params, options);
  FusedSGD plain(copies, options);
  amp::GradScaler scaler(torch::kCPU);
  const auto loss_of = [](const std::vector<torch::Tensor>& tensors) {
    torch::Tensor loss = torch::zeros({});
    for (const auto& tensor : tensors) loss = loss + tensor.square().sum();
    return loss;
  };
  for (int i = 0; i < 5; ++i) {
    optimizer.zero_grad();
    scaler.scale(loss_of(params)).backward();
    scaler.step(optimizer);
    scaler.update();
    plain.zero_grad();
    loss_of(copies).backward();
    plain.step();
  }
  expect_equal(params, copies);
}

TEST(FusedSGD, ABufferWithoutACountIsRefused) {
  const auto params = make_params();
  FusedSGD optimizer(params, FusedSGDOptions(1e-3).momentum(0.9));
  auto state = std::make_unique<FusedSGDParamState>();
  state->momentum_buffer(torch::ones_like(params[1]));
  optimizer.state()[params[1].unsafeGetTensorImpl()] = std::move(state);
  const auto before = copy_of(params);
  set_grads(params, 0);
  expect_error([&] { optimizer.step(); },
               "FusedSGD: expected the state of a parameter of sizes [1] to have all of step");
  expect_equal(params, before);
}

TEST(FusedSGDOptions, OutOfRangeValuesAreRefusedByName) {
  using Options = FusedSGDOptions;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto construct = [](const Options& options) {
    return [options] { FusedSGD optimizer(make_params(), options); };
  };
  expect_error(construct(Options().momentum(nan)), "defaults.momentum to be at least 0 and finite");
  expect_error(construct(Options().dampening(-0.1)),
               "defaults.dampening to be at least 0 and finite");
  const std::string nesterov =
      "defaults.nesterov to come with a momentum above 0 and a dampening of 0, got ";
  expect_error(construct(Options().nesterov(true)), nesterov + "0 and 0");
  expect_error(construct(Options().nesterov(true).momentum(0.5).dampening(0.25)),
               nesterov + "0.5 and 0.25");
}

TEST(FusedSGDOptions, AScheduleMayEndTheMomentum) {
  const auto params = make_params();
  FusedSGD optimizer(params, FusedSGDOptions().momentum(0.9).nesterov(true));
  for (const auto& param : params) param.mutable_grad() = torch::ones_like(param);
  optimizer.step();
  static_cast<FusedSGDOptions&>(optimizer.param_groups()[0].options()).momentum(0.0);
  optimizer.step();
  FusedSGD loaded(make_params(), FusedSGDOptions().momentum(0.9).nesterov(true));
  loaded.load_state_dict(optimizer.state_dict());
  EXPECT_EQ(static_cast<FusedSGDOptions&>(loaded.param_groups()[0].options()).momentum(), 0.0);
}

}  // namespace
}  // namespace torchfuse::optim
