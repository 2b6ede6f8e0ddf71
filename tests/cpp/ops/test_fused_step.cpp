// SPDX-License-Identifier: BSD-3-Clause
// FusedStep: plan validity, errors by name, skipping, clipping, mixed layouts, threads.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/fused_step.h>

#include <string>

namespace torchfuse {
namespace {

const std::vector<HyperParam> kGroup{1e-2, 0.9, 0.999, 1e-8, 0.1, 1.0, 1.0, 0.0, 0.0};

FusedSlot make_slot(const at::Tensor& param) {
  FusedSlot slot;
  slot.param = param;
  slot.states = {torch::zeros_like(param), torch::zeros_like(param), at::Tensor()};
  slot.step = torch::zeros({});
  return slot;
}

at::Tensor make_param(at::IntArrayRef sizes) {
  at::Tensor param = torch::randn(sizes).requires_grad_();
  param.mutable_grad() = torch::randn(sizes);
  return param;
}

template <class Body>
std::string message_of(const Body& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

TEST(FusedStep, NamesItsParts) {
  const FusedStep step("adam");
  EXPECT_EQ(step.state_names(),
            (std::vector<std::string>{"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}));
  EXPECT_EQ(step.hyper_param_names().size(), kGroup.size());
  EXPECT_NE(message_of([] { FusedStep unknown("adamm"); }).find(" adam, "), std::string::npos);
}

TEST(FusedStep, AgreesWithTorch) {
  torch::manual_seed(1);
  const at::Tensor param = make_param({33, 7});
  const at::Tensor twin = param.detach().clone().requires_grad_();
  torch::optim::AdamW reference({twin}, torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
  FusedStep step("adam");
  step.plan({make_slot(param)});
  for (int i = 0; i < 20; ++i) {
    param.mutable_grad() = torch::randn({33, 7});
    twin.mutable_grad() = param.grad().clone();
    step.step({kGroup});
    reference.step();
  }
  EXPECT_TRUE(torch::allclose(param, twin, 1e-5, 1e-6));
}

TEST(FusedStep, SeesReplacedMemory) {
  const at::Tensor param = make_param({8});
  FusedStep step("adam");
  step.plan({make_slot(param)});
  step.step({kGroup});
  const at::Tensor other = torch::ones({8});
  param.set_data(other);
  step.step({kGroup});
  EXPECT_FALSE(torch::equal(other, torch::ones({8}))) << "the new memory was not updated";
}

TEST(FusedStep, MatchesLayoutsElementByElement) {
  const at::Tensor param = torch::randn({4, 6}).t().contiguous().t().requires_grad_();
  ASSERT_FALSE(param.is_contiguous());
  const at::Tensor twin = param.detach().contiguous().requires_grad_();
  param.mutable_grad() = torch::randn({4, 6});
  twin.mutable_grad() = param.grad().clone();
  FusedStep step("adam");
  step.plan({make_slot(param), make_slot(twin)});
  step.step({kGroup});
  EXPECT_TRUE(torch::equal(param, twin));
}

TEST(FusedStep, SkipsBitForBitOnAnyNonZeroFlag) {
  for (const double flag : {1.0, 2.0}) {
    const at::Tensor param = make_param({100});
    const at::Tensor before = param.detach().clone();
    FusedStep step("adam");
    step.plan({make_slot(param)});
    FusedStepOptions options;
    options.found_inf = torch::full({}, flag, torch::kFloat);
    step.step({kGroup}, options);
    EXPECT_TRUE(torch::equal(param, before));
    EXPECT_EQ(step.slots()[0].step.item<float>(), 0.0f);
    EXPECT_EQ(step.skipped().item<float>(), 1.0f);
  }
}

TEST(FusedStep, ChecksInsideTheStep) {
  const at::Tensor a = make_param({100});
  const at::Tensor b = make_param({3});
  b.grad()[2] = INFINITY;
  FusedStep step("adam");
  step.plan({make_slot(a), make_slot(b)});
  FusedStepOptions options;
  options.check_inside = true;
  options.found_inf = torch::zeros({});
  const at::Tensor before = a.detach().clone();
  step.step({kGroup}, options);
  EXPECT_TRUE(torch::equal(a, before));
  EXPECT_EQ(options.found_inf->item<float>(), 1.0f);
}

TEST(FusedStep, ClipsByTheTrueNormAndWritesBackOnlyOnRequest) {
  const at::Tensor param = make_param({1000});
  const at::Tensor grad = param.grad().clone();
  FusedStep step("adam");
  step.plan({make_slot(param)});
  FusedStepOptions options;
  options.grad_scale = torch::full({}, 4.0);
  options.max_grad_norm = 1.0;
  step.step({kGroup}, options);
  EXPECT_TRUE(torch::equal(param.grad(), grad));
  EXPECT_NEAR(step.total_norm().item<float>(), grad.norm().item<float>() / 4, 1e-4);
  options.write_back_grads = true;
  step.step({kGroup}, options);
  EXPECT_NEAR(param.grad().norm().item<float>(), 1.0f, 1e-5);
}

TEST(FusedStep, NamesTheOffender) {
  const at::Tensor good = make_param({4});
  const at::Tensor bad = make_param({4});
  FusedStep step("adam");
  std::vector<FusedSlot> slots{make_slot(good), make_slot(bad)};
  slots[1].states[0] = torch::zeros({5});
  EXPECT_NE(message_of([&] {
              step.plan(slots);
            }).find("fused_adam_: expected exp_avgs[1] to have the sizes of params, [4], got [5]"),
            std::string::npos);
  step.plan({make_slot(good), make_slot(bad)});
  bad.mutable_grad() = torch::randn({4}).to_sparse();
  const at::Tensor before = good.detach().clone();
  EXPECT_NE(message_of([&] { step.step({kGroup}); }).find("expected grads[1] to be dense"),
            std::string::npos);
  EXPECT_TRUE(torch::equal(good, before)) << "something was written before the check";
  bad.mutable_grad() = torch::randn({4});
  step.step({kGroup});
  EXPECT_FALSE(torch::equal(good, before)) << "the optimizer no longer works";
}

TEST(FusedStep, RefusesHyperParametersOutOfRange) {
  const at::Tensor param = make_param({4});
  FusedStep step("adam");
  step.plan({make_slot(param)});
  const std::vector<std::pair<int, double>> cases{
      {0, -1.0}, {0, NAN}, {1, 1.0}, {2, -0.1}, {3, -1e-9}};
  for (const auto& [index, value] : cases) {
    std::vector<HyperParam> group = kGroup;
    group[index] = value;
    const std::string expected =
        "expected " + step.hyper_param_names()[index] + "[0] to be a number";
    EXPECT_NE(message_of([&] { step.step({group}); }).find(expected), std::string::npos);
  }
}

TEST(FusedStep, BumpsVersions) {
  const at::Tensor param = make_param({4});
  FusedStep step("adam");
  step.plan({make_slot(param)});
  const auto version = param._version();
  step.step({kGroup});
  EXPECT_GT(param._version(), version);
}

TEST(HomeSteps, GivesSeparateElementsOfOneBuffer) {
  const std::vector<at::Tensor> params{torch::ones({2}), torch::ones({3})};
  const auto steps = home_steps(params, {torch::full({}, 4.0), at::Tensor()});
  EXPECT_EQ(steps[0].item<float>(), 4.0f);
  EXPECT_EQ(steps[1].item<float>(), 0.0f);
  EXPECT_TRUE(steps[0].is_alias_of(steps[1]));
  steps[0].add_(1);
  EXPECT_EQ(steps[1].item<float>(), 0.0f);
  const auto again = home_steps(params, steps);
  EXPECT_TRUE(again[0].is_same(steps[0]) && again[1].is_same(steps[1]));
}

}  // namespace
}  // namespace torchfuse
