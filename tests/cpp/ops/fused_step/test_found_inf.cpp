// SPDX-License-Identifier: BSD-3-Clause
// FusedStep: a found_inf that the step writes, whatever it was.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/fused_step.h>

#include "adam_slots.h"

namespace torchfuse {
namespace {

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
