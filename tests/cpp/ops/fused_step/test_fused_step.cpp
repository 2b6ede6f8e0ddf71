// SPDX-License-Identifier: BSD-3-Clause
// FusedStep: plan validity, errors by name, clipping, mixed layouts, a found_inf that the step
// writes. Skipped steps, and what a step holds: tests/cpp/api/optim.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/fused_step.h>

#include <string>

#include "adam_slots.h"

namespace torchfuse {
namespace {

TEST(FusedStep, NamesItsParts) {
  const FusedStep step("adam");
  EXPECT_EQ(step.state_names(),
            (std::vector<std::string>{"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}));
  EXPECT_EQ(step.hyper_params().size(), kGroup.size());
  expect_error([] { FusedStep unknown("adamm"); }, " adam, ");
}

TEST(FusedStep, SeesReplacedMemory) {
  const at::Tensor param = make_param({8});
  FusedStep step("adam");
  const std::vector<FusedSlot> slots{make_slot(param)};
  step.plan(slots);
  step.step(slots, {kGroup});
  const at::Tensor other = torch::ones({8});
  param.set_data(other);
  step.step(slots, {kGroup});
  EXPECT_FALSE(torch::equal(other, torch::ones({8}))) << "the new memory was not updated";
}

TEST(FusedStep, HasNoPlanAfterAReset) {
  const at::Tensor param = make_param({4});
  const std::vector<FusedSlot> slots{make_slot(param)};
  FusedStep step("adam");
  step.plan(slots);
  EXPECT_TRUE(step.planned());
  step.reset();
  EXPECT_FALSE(step.planned());
  EXPECT_FALSE(step.step({borrow(slots[0])}, {kGroup}));
}

TEST(FusedStep, MatchesLayoutsElementByElement) {
  const at::Tensor param = torch::randn({4, 6}).t().contiguous().t().requires_grad_();
  ASSERT_FALSE(param.is_contiguous());
  const at::Tensor twin = param.detach().contiguous().requires_grad_();
  param.mutable_grad() = torch::randn({4, 6});
  twin.mutable_grad() = param.grad().clone();
  FusedStep step("adam");
  const std::vector<FusedSlot> slots{make_slot(param), make_slot(twin)};
  step.plan(slots);
  step.step(slots, {kGroup});
  EXPECT_TRUE(torch::equal(param, twin));
}

TEST(FusedStep, ClipsByTheTrueNormAndWritesBackOnlyOnRequest) {
  const at::Tensor param = make_param({1000});
  const at::Tensor grad = param.grad().clone();
  FusedStep step("adam");
  const std::vector<FusedSlot> slots{make_slot(param)};
  step.plan(slots);
  FusedStepOptions options;
  options.grad_scale = torch::full({}, 4.0);
  options.max_grad_norm = 1.0;
  step.step(slots, {kGroup}, options);
  EXPECT_TRUE(torch::equal(param.grad(), grad));
  EXPECT_NEAR(step.total_norm().item<float>(), grad.norm().item<float>() / 4, 1e-4);
  options.write_back_grads = true;
  step.step(slots, {kGroup}, options);
  EXPECT_NEAR(param.grad().norm().item<float>(), 1.0f, 1e-5);
}

TEST(FusedStep, NamesTheOffender) {
  const at::Tensor good = make_param({4});
  const at::Tensor bad = make_param({4});
  FusedStep step("adam", "MyAdam::step");
  std::vector<FusedSlot> slots{make_slot(good), make_slot(bad)};
  slots[1].group = 2;
  slots[1].position = 7;
  const at::Tensor fits = slots[1].states[0];
  slots[1].states[0] = torch::zeros({5});
  expect_error([&] { step.plan(slots); },
               "MyAdam::step: expected exp_avg of params[7] of group 2 to have the sizes of "
               "params, [4], got [5]");
  slots[1].states[0] = fits;
  step.plan(slots);
  bad.mutable_grad() = torch::randn({4}).to_sparse();
  const at::Tensor before = good.detach().clone();
  const std::vector<std::vector<HyperParam>> groups(3, kGroup);
  expect_error([&] { step.step(slots, groups); },
               "MyAdam::step: expected grad of params[7] of group 2 to be dense");
  EXPECT_TRUE(torch::equal(good, before)) << "something was written before the check";
  bad.mutable_grad() = torch::randn({4});
  step.step(slots, groups);
  EXPECT_FALSE(torch::equal(good, before)) << "the optimizer no longer works";
}

/// Tensors as a plan or a step sees them, for the overload that says whether they fit.
std::vector<SlotTensors> borrow_all(const std::vector<FusedSlot>& slots) {
  std::vector<SlotTensors> tensors;
  for (const FusedSlot& slot : slots) tensors.push_back(borrow(slot));
  return tensors;
}

TEST(FusedStep, TakesEqualTensorsWhereverTheyLie) {
  const at::Tensor param = make_param({64});
  FusedStep step("adam");
  std::vector<FusedSlot> slots{make_slot(param)};
  step.plan(slots);
  slots = {make_slot(make_param({64}))};
  EXPECT_TRUE(step.step(borrow_all(slots), {kGroup}));
  EXPECT_EQ(slots[0].step.item<float>(), 1.0f);
}

TEST(FusedStep, RefusesTensorsThatAreNotAsPlanned) {
  const at::Tensor param = make_param({4, 3, 2, 2});
  FusedStep step("adam");
  step.plan({make_slot(param)});
  const auto other = [&](const auto& change) {
    std::vector<FusedSlot> slots{make_slot(make_param({4, 3, 2, 2}))};
    change(slots[0]);
    const at::Tensor before = slots[0].param.detach().clone();
    EXPECT_FALSE(step.step(borrow_all(slots), {kGroup}));
    EXPECT_TRUE(torch::equal(slots[0].param, before));
  };
  other([](FusedSlot& slot) { slot.states[0] = torch::zeros({4, 3, 2, 2}, at::kBFloat16); });
  other([](FusedSlot& slot) { slot.states[1] = torch::zeros({4, 3, 4}); });
  other([](FusedSlot& slot) { slot.states[1] = at::Tensor(); });
  other([](FusedSlot& slot) { slot.states[2] = torch::zeros({4, 3, 2, 2}); });
  other([](FusedSlot& slot) { slot.master = torch::zeros({4, 3, 2, 2}); });
  other([](FusedSlot& slot) { slot.step = torch::zeros({}, at::kDouble); });
  other([](FusedSlot& slot) {
    slot.states[0] = slot.states[0].contiguous(at::MemoryFormat::ChannelsLast);
  });
  other([](FusedSlot& slot) { slot.states[0].storage().set_nbytes(8); });
  other([](FusedSlot& slot) { slot.param.storage().set_nbytes(188); });
  EXPECT_FALSE(step.step(std::vector<SlotTensors>(), {kGroup})) << "another number of slots";
}

TEST(FusedStep, LaysStatesOutLikeTheirParameterInPlace) {
  const at::Tensor param = make_param({4, 3, 5, 6});
  std::vector<FusedSlot> slots{make_slot(param)};
  FusedStep step("adam");
  step.step(slots, {kGroup});
  const c10::TensorImpl* const impl = slots[0].states[0].unsafeGetTensorImpl();
  const at::Tensor values = slots[0].states[0].clone();
  const at::Tensor kept = slots[0].states[0];
  param.set_data(param.detach().contiguous(at::MemoryFormat::ChannelsLast));
  param.mutable_grad() = torch::zeros_like(param);
  std::vector<HyperParam> still = kGroup;
  still[1] = 0.0;  // beta1: the moment is the gradient's
  step.plan(slots);
  EXPECT_EQ(kept.unsafeGetTensorImpl(), impl);
  EXPECT_TRUE(kept.is_contiguous(at::MemoryFormat::ChannelsLast));
  EXPECT_TRUE(torch::equal(kept, values));
  EXPECT_TRUE(step.step(borrow_all(slots), {still}));
}

TEST(FusedStep, RefusesGradientsThatOverlapBeforeItWritesThemBack) {
  const at::Tensor first = make_param({8});
  const at::Tensor second = make_param({8});
  second.mutable_grad() = torch::ones({1}).expand({8});
  std::vector<FusedSlot> slots{make_slot(first), make_slot(second)};
  FusedStep step("adam");
  FusedStepOptions options;
  options.max_grad_norm = 1.0;
  options.write_back_grads = true;
  const at::Tensor before = first.detach().clone();
  expect_error([&] { step.step(slots, {kGroup}, options); },
               "expected grad of params[0] of group 0 to have separate memory for every "
               "element with write_back_grads, got strides [0]");
  EXPECT_TRUE(torch::equal(first, before));
  EXPECT_EQ(slots[0].step.item<float>(), 0.0f);
  options.write_back_grads = false;
  step.step(slots, {kGroup}, options);
  EXPECT_EQ(slots[1].step.item<float>(), 1.0f);
}

TEST(FusedStep, ResultsAreThoseOfTheLastStep) {
  const at::Tensor param = make_param({8});
  std::vector<FusedSlot> slots{make_slot(param)};
  FusedStep step("adam");
  EXPECT_FALSE(step.skipped().defined());
  FusedStepOptions options;
  options.found_inf = torch::ones({});
  options.max_grad_norm = 1.0;
  step.step(slots, {kGroup}, options);
  EXPECT_EQ(step.skipped().item<float>(), 1.0f);
  EXPECT_GT(step.total_norm().item<float>(), 0.0f);
  param.mutable_grad() = at::Tensor();
  step.step(slots, {kGroup}, options);
  EXPECT_EQ(step.skipped().item<float>(), 0.0f) << "nothing was there to be skipped";
  EXPECT_EQ(step.total_norm().item<float>(), 0.0f);
}

TEST(FusedStep, RefusesHyperParametersOutOfRange) {
  const std::vector<FusedSlot> slots{make_slot(make_param({4}))};
  FusedStep step("adam", "fused_adam_");
  step.plan(slots);
  for (const auto& [index, value] :
       std::vector<std::pair<int, double>>{{0, -1.0}, {0, NAN}, {1, 1.0}, {2, -0.1}, {3, -1e-9}}) {
    std::vector<HyperParam> group = kGroup;
    group[index] = value;
    const std::string expected = step.hyper_params()[index].name + " of group 1 to be at least";
    expect_error([&] { step.step(slots, {kGroup, group}); }, expected);
  }
}

TEST(FusedStep, BumpsVersions) {
  const at::Tensor param = make_param({4});
  FusedStep step("adam");
  const std::vector<FusedSlot> slots{make_slot(param)};
  step.plan(slots);
  FusedStepOptions options;
  options.max_grad_norm = 1.0;
  options.write_back_grads = true;
  for (const at::Tensor& written :
       {param, param.grad(), slots[0].states[0], slots[0].states[1], slots[0].step}) {
    const auto version = written._version();
    step.step(slots, {kGroup}, options);
    EXPECT_GT(written._version(), version);
  }
  const auto version = param.grad()._version();
  step.step(slots, {kGroup});
  EXPECT_EQ(param.grad()._version(), version) << "a step only reads gradients";
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
  const at::Tensor before = param.detach().clone();
  step.step(slots, {kGroup}, options);
  EXPECT_TRUE(torch::equal(param, before));
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
