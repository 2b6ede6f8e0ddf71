// SPDX-License-Identifier: BSD-3-Clause
// What a step keeps beside the states: masters of 16-bit parameters, averages, and step counts as
// elements of one buffer per device.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/fused_step.h>
#include <torchfuse/masters.h>
#include <torchfuse/step_views.h>

#include <cmath>
#include <string>
#include <vector>

#include "adam_slots.h"

namespace torchfuse {
namespace {

TEST(RemakeMaster, ChangesOnlyWhatDoesNotRoundToTheParameter) {
  const at::Tensor master = torch::randn({1000});
  const at::Tensor kept = master.clone();
  const at::Tensor param = master.to(at::kBFloat16);
  remake_master(param, master);
  EXPECT_TRUE(torch::equal(master, kept));
  param.slice(0, 0, 10).fill_(100.0);
  remake_master(param, master);
  EXPECT_TRUE(torch::equal(master.slice(0, 0, 10), torch::full({10}, 100.0)));
  EXPECT_TRUE(torch::equal(master.slice(0, 10), kept.slice(0, 10)));
  expect_error([&] { remake_master(master, master); }, "expected param to be of dtype");
}

TEST(Masters, AndRemaindersConvertExactly) {
  const at::Tensor masters = torch::randn({4096});
  const at::Tensor remainder = remainder_of_master(masters);
  EXPECT_TRUE(torch::equal(master_of_remainder(masters.to(at::kBFloat16), remainder), masters));
  // Halfway between two parameters, the even one of which is nearer to zero: one unit is lost.
  const at::Tensor tie = torch::full({1}, 1.0 + 0x1p-8);
  EXPECT_EQ(remainder_of_master(tie).item<int>(), 32767);
  expect_error([&] { master_of_remainder(masters, remainder); },
               "expected param to be of dtype bfloat16, got Float");
  expect_error([&] { remainder_of_master(remainder); },
               "expected master to be of dtype float32, got Short");
}

TEST(RemakeMaster, ClearsRemaindersThatExtendNoParameter) {
  const float inf = INFINITY;
  const at::Tensor param = torch::tensor({0.0f, -0.0f, 0.0f, 1.0f, inf, inf, -inf}, at::kBFloat16);
  const at::Tensor remainder = torch::tensor({-1, -32768, 7, -32768, 1, -1, 32767}, at::kShort);
  const at::Tensor masters = master_of_remainder(param, remainder);
  EXPECT_TRUE(torch::equal(masters.isnan(), torch::zeros({7}, at::kBool))) << masters;
  EXPECT_TRUE(std::signbit(masters[1].item<float>()));
  remake_master(param, remainder);
  EXPECT_TRUE(torch::equal(remainder, torch::tensor({0, 0, 7, -32768, 0, -1, 0}, at::kShort)));
  EXPECT_TRUE(torch::equal(master_of_remainder(param, remainder), masters));
}

TEST(Masters, FollowWritesToTheirParameters) {
  // Far from 100, which is written below: a master that rounds to it would be kept.
  const at::Tensor param = torch::randn({100}, at::kBFloat16).requires_grad_();
  FusedSlot slot = make_slot(param);
  slot.states = {torch::zeros({100}), torch::zeros({100}), at::Tensor()};
  slot.master = param.detach().to(at::kFloat) * 1.001;
  std::vector<FusedSlot> slots{slot};
  FusedStep step("adam");
  const std::vector<HyperParam> still{0.0, 0.9, 0.999, 0.0, 1e-8, 0.0, 0.0, 1.0, 1.0};
  for (int i = 0; i < 3; ++i) {
    param.mutable_grad() = torch::randn({100}, at::kBFloat16);
    step.step(slots, {still});
  }
  const at::Tensor before = slot.master.clone();
  {
    const torch::NoGradGuard no_grad;
    param.slice(0, 0, 50).fill_(100.0);
    param.copy_(param.clone());
  }
  step.step(slots, {still});
  EXPECT_TRUE(torch::equal(slot.master.slice(0, 0, 50), torch::full({50}, 100.0)));
  EXPECT_TRUE(torch::equal(slot.master.slice(0, 50), before.slice(0, 50)));
}

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

TEST(FusedStepEma, AreLeftWithoutTheOption) {
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
  expect_error([&] { step.step({slot}, {kPlainSgd}, averaging()); },
               "FusedStep::step: expected ema_param of params[0] of group 0 to be a tensor in a "
               "step with averages, got none");
  EXPECT_TRUE(torch::equal(slot.param, torch::full({5}, 3.0)));
}

TEST(FusedStepEma, RefusesAveragesThatDoNotFit) {
  FusedStep step("sgd");
  FusedSlot slot = slot_with_average();
  slot.ema = torch::ones({5}, at::kHalf);
  expect_error([&] { step.plan({slot}); }, "ema_param of params[0] of group 0");
  expect_error([&] { step.plan({slot}); },
               "to be of dtype float32, as its parameter is not float64, got Half");
  slot.ema = torch::ones({4});
  expect_error([&] { step.plan({slot}); }, "ema_param of params[0] of group 0");
  FusedSlot wide = slot_with_average(at::kDouble);
  wide.ema = torch::ones({5});
  expect_error([&] { step.plan({wide}); }, "to be of the parameter's dtype, float64, got Float");
}

TEST(FusedStepEma, RefusesOptionsOutOfRange) {
  const FusedSlot slot = slot_with_average();
  FusedStep step("sgd");
  for (const double decay : {1.0, -0.5, std::nan("")}) {
    expect_error([&] { step.step({slot}, {kPlainSgd}, averaging(decay)); },
                 "FusedStep::step: expected ema_decay to be at least 0 and less than 1, got ");
  }
  expect_error([&] { step.step({slot}, {kPlainSgd}, averaging(0.5, -1)); },
               "FusedStep::step: expected ema_start_step to be at least 0, got -1");
  EXPECT_TRUE(torch::equal(slot.param, torch::ones({5})));
}

TEST(StepViews, AreSeparateElementsOfOneBuffer) {
  const std::vector<at::Tensor> params{torch::ones({2}), torch::ones({3})};
  const auto steps = step_views(params, {torch::full({}, 4.0), at::Tensor()});
  EXPECT_EQ(steps[0].item<float>(), 4.0f);
  EXPECT_EQ(steps[1].item<float>(), 0.0f);
  EXPECT_TRUE(steps[0].is_alias_of(steps[1]));
  steps[0].add_(1);
  EXPECT_EQ(steps[1].item<float>(), 0.0f);
  const auto again = step_views(params, steps);
  EXPECT_TRUE(again[0].is_same(steps[0]) && again[1].is_same(steps[1]));
}

TEST(StepViews, AreKeptWhenParametersJoin) {
  const std::vector<at::Tensor> params{torch::ones({2}), torch::ones({3}), torch::ones({4})};
  const auto first = step_views({params[0]}, {torch::full({}, 4.0)});
  const auto steps = step_views(params, {first[0], torch::full({}, 2.0), first[0]});
  EXPECT_TRUE(steps[0].is_same(first[0]));
  EXPECT_FALSE(steps[2].is_alias_of(first[0])) << "an element is one step's alone";
  EXPECT_TRUE(steps[1].is_alias_of(steps[2]));
  EXPECT_EQ(steps[1].item<float>(), 2.0f);
  EXPECT_EQ(steps[2].item<float>(), 4.0f);
}

}  // namespace
}  // namespace torchfuse
