// SPDX-License-Identifier: BSD-3-Clause
// FusedStep: a found_inf that the step writes, whatever it was.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/fused_step.h>

namespace torchfuse {
namespace {

const std::vector<HyperParam> kGroup{1e-2, 0.9, 0.999, 0.1, 1e-8, 0.0, 0.0, 1.0, 1.0};

at::Tensor make_param(at::IntArrayRef sizes) {
  at::Tensor param = torch::randn(sizes).requires_grad_();
  param.mutable_grad() = torch::randn(sizes);
  return param;
}

FusedSlot make_slot(const at::Tensor& param) {
  FusedSlot slot;
  slot.param = param;
  slot.states = {torch::zeros_like(param), torch::zeros_like(param), at::Tensor()};
  slot.step = torch::zeros({});
  return slot;
}

TEST(FoundInf, AFlagThatIsAnOutputNeedNotBeCleared) {
  const at::Tensor param = make_param({100});
  FusedStep step("adam");
  const std::vector<FusedSlot> slots{make_slot(param)};
  step.plan(slots);
  FusedStepOptions options;
  options.check_inside = options.found_inf_is_output = true;
  options.found_inf = torch::ones({});
  step.step(slots, {kGroup}, options);
  EXPECT_EQ(options.found_inf->item<float>(), 0.0f);
  EXPECT_EQ(slots[0].step.item<float>(), 1.0f);
  param.mutable_grad()[7] = INFINITY;
  step.step(slots, {kGroup}, options);
  EXPECT_EQ(options.found_inf->item<float>(), 1.0f);
  EXPECT_EQ(slots[0].step.item<float>(), 1.0f);
  param.mutable_grad() = at::Tensor();
  step.step(slots, {kGroup}, options);
  EXPECT_EQ(options.found_inf->item<float>(), 0.0f) << "without a gradient nothing is found";
}

TEST(FoundInf, AFlagThatIsAnOutputIsThatOfACheck) {
  FusedStep step("adam");
  const std::vector<FusedSlot> slots{make_slot(make_param({3}))};
  step.plan(slots);
  FusedStepOptions options;
  options.found_inf_is_output = true;
  options.found_inf = torch::ones({});
  EXPECT_THROW(step.step(slots, {kGroup}, options), c10::Error);
  options.check_inside = true;
  options.found_inf.reset();
  EXPECT_THROW(step.step(slots, {kGroup}, options), c10::Error);
}

}  // namespace
}  // namespace torchfuse
