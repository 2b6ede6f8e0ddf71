// SPDX-License-Identifier: BSD-3-Clause
// FusedSGD's buffer, which may come later than the count, against torch::optim::SGD.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <vector>

#include <torchfuse/optim/fused_sgd.h>

#include "optim_testing.h"

namespace torchfuse::optim {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace): all helpers

/// FusedSGD beside torch's, which counts by the buffer, too. Dampening shows which step is a
/// buffer's first.
struct BesideTorch {
  void set_momentum(double value) {
    options_of(optimizer).momentum(value);
    static_cast<torch::optim::SGDOptions&>(reference.param_groups()[0].options()).momentum(value);
  }
  void run(int first, int last) {
    run_steps(optimizer, params, first, last);
    run_steps(reference, expected, first, last);
  }
  /// One that makes a buffer and leaves it without an update.
  void skip_a_step() {
    set_grads(params, 0);
    params[4].grad().view(-1)[209] = std::numeric_limits<float>::infinity();
    optimizer.step();
  }

  std::vector<torch::Tensor> params = make_params();
  std::vector<torch::Tensor> expected = copy_of(params);
  FusedSGD optimizer{params, FusedSGDOptions(1e-3).dampening(0.5).skip_non_finite(true)};
  torch::optim::SGD reference{expected, torch::optim::SGDOptions(1e-3).dampening(0.5)};
};

TEST(FusedSGD, ABufferThatComesLateHasAFirstStepOfItsOwn) {
  BesideTorch sgd;
  sgd.run(0, 3);
  EXPECT_FALSE(state_of(sgd.optimizer, sgd.params[0]).momentum_buffer().defined());
  for (const double momentum : {0.9, 0.0, 0.9}) {  // the last finds the buffer of the first
    sgd.set_momentum(momentum);
    sgd.run(3, 6);
    expect_close(sgd.params, sgd.expected);
  }
}

TEST(FusedSGD, ALaterBufferHasAFirstUpdateAndLeavesTheCount) {
  BesideTorch sgd;
  sgd.run(0, 3);
  sgd.set_momentum(0.9);
  sgd.skip_a_step();
  const auto copies = copy_of(sgd.params);
  FusedSGD loaded(copies);
  load(loaded, saved(sgd.optimizer));
  sgd.run(3, 6);
  expect_close(sgd.params, sgd.expected);
  run_steps(loaded, copies, 3, 6);
  expect_equal(copies, sgd.params);
  for (const auto& state : {state_of(sgd.optimizer, sgd.params[0]), state_of(loaded, copies[0])}) {
    EXPECT_EQ(state.step().item<float>(), 6.0f);
    EXPECT_EQ(state.momentum_start().item<float>(), 3.0f);
  }
}

TEST(FusedSGD, AMomentumThatPausesBeforeTheFirstUpdate) {
  BesideTorch sgd;
  options_of(sgd.optimizer).momentum(0.9);
  sgd.skip_a_step();
  for (const double momentum : {0.0, 0.9}) {
    sgd.set_momentum(momentum);
    sgd.run(0, 2);
  }
  expect_close(sgd.params, sgd.expected);
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
