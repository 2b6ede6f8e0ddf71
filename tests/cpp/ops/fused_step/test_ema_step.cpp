// SPDX-License-Identifier: BSD-3-Clause
// FusedStep with averages: what it refuses by name before anything is written, and what it moves.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/fused_step.h>

#include <cmath>
#include <string>
#include <vector>

namespace torchfuse {
namespace {

const std::vector<HyperParam> kPlainSgd{0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0};  // plain SGD

FusedSlot slot_with_average(at::ScalarType dtype = at::kFloat) {
  FusedSlot slot;
  slot.param = torch::ones({5}, dtype).requires_grad_();
  slot.param.mutable_grad() = torch::full({5}, -2.0, dtype);
  slot.states = {at::Tensor()};
  slot.step = torch::zeros({});
  slot.ema = torch::ones({5}, dtype == at::kDouble ? at::kDouble : at::kFloat);
  return slot;
}

FusedStepOptions averaging(double decay = 0.75, std::int64_t start_step = 0) {
  FusedStepOptions options;
  options.ema = EmaOptions{decay, false, start_step};
  return options;
}

template <class Body>
std::string error_of(const Body& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

#define EXPECT_MESSAGE(message, text) \
  EXPECT_NE((message).find(text), std::string::npos) << "got: " << (message)

TEST(FusedStepEma, MovesTheAverages) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    const FusedSlot slot = slot_with_average(dtype);
    FusedStep step("sgd");
    step.step({slot}, {kPlainSgd}, averaging());
    EXPECT_TRUE(torch::equal(slot.param, torch::full({5}, 2.0, dtype)));
    EXPECT_TRUE(torch::equal(slot.ema, torch::full({5}, 1.25, slot.ema.scalar_type())));
  }
}

TEST(FusedStepEma, LeavesThemWithoutTheOption) {
  const FusedSlot slot = slot_with_average();
  FusedStep step("sgd");
  step.step({slot}, {kPlainSgd});
  EXPECT_TRUE(torch::equal(slot.ema, torch::ones({5})));
  EXPECT_EQ(slot.ema._version(), 0);
}

TEST(FusedStepEma, SeesReplacedAverages) {
  FusedSlot slot = slot_with_average();
  FusedStep step("sgd");
  step.step({slot}, {kPlainSgd}, averaging());
  slot.ema = torch::zeros({5});
  step.step({slot}, {kPlainSgd}, averaging());
  EXPECT_TRUE(torch::equal(slot.ema, torch::full({5}, 0.75)));
  slot.ema.reset();
  EXPECT_MESSAGE(error_of([&] { step.step({slot}, {kPlainSgd}, averaging()); }),
                 "FusedStep::step: expected ema_param of params[0] of group 0 to be a tensor in a "
                 "step with averages, got none");
  EXPECT_TRUE(torch::equal(slot.param, torch::full({5}, 3.0)));
}

TEST(FusedStepEma, RefusesAveragesThatDoNotFit) {
  FusedStep step("sgd");
  FusedSlot slot = slot_with_average();
  slot.ema = torch::ones({5}, at::kHalf);
  EXPECT_MESSAGE(error_of([&] { step.plan({slot}); }), "ema_param of params[0] of group 0");
  EXPECT_MESSAGE(error_of([&] { step.plan({slot}); }),
                 "to be of dtype float32, as its parameter is not float64, got Half");
  slot.ema = torch::ones({4});
  EXPECT_MESSAGE(error_of([&] { step.plan({slot}); }), "ema_param of params[0] of group 0");
  FusedSlot wide = slot_with_average(at::kDouble);
  wide.ema = torch::ones({5});
  EXPECT_MESSAGE(error_of([&] { step.plan({wide}); }),
                 "to be of the parameter's dtype, float64, got Float");
}

TEST(FusedStepEma, RefusesOptionsOutOfRange) {
  const FusedSlot slot = slot_with_average();
  FusedStep step("sgd");
  for (const double decay : {1.0, -0.5, std::nan("")}) {
    EXPECT_MESSAGE(error_of([&] { step.step({slot}, {kPlainSgd}, averaging(decay)); }),
                   "FusedStep::step: expected ema_decay to be at least 0 and less than 1, got ");
  }
  EXPECT_MESSAGE(error_of([&] { step.step({slot}, {kPlainSgd}, averaging(0.5, -1)); }),
                 "FusedStep::step: expected ema_start_step to be at least 0, got -1");
  EXPECT_TRUE(torch::equal(slot.param, torch::ones({5})));
}

}  // namespace
}  // namespace torchfuse
