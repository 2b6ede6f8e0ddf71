// SPDX-License-Identifier: BSD-3-Clause
// FusedSGD's buffer, which may come later than the count, against torch::optim::SGD.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>

#include <torchfuse/optim/fused_sgd.h>

#include "optim_testing.h"

namespace torchfuse::optim {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace): all helpers
using testing::options_of;

torch::optim::SGDOptions& options_of(torch::optim::SGD& optimizer) {
  return static_cast<torch::optim::SGDOptions&>(optimizer.param_groups()[0].options());
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

TEST(FusedSGDOptions, AScheduleMayEndTheMomentum) {
  const auto params = make_params();
  FusedSGD optimizer(params, FusedSGDOptions().momentum(0.9).nesterov(true));
  for (const auto& param : params) param.mutable_grad() = torch::ones_like(param);
  optimizer.step();
  options_of(optimizer).momentum(0.0);
  optimizer.step();
  FusedSGD loaded(make_params(), FusedSGDOptions().momentum(0.9).nesterov(true));
  loaded.load_state_dict(optimizer.state_dict());
  EXPECT_EQ(options_of(loaded).momentum(), 0.0);
}

}  // namespace
}  // namespace torchfuse::optim
