// SPDX-License-Identifier: BSD-3-Clause
// The scaler's steps and scales; training under it against the same without: test_class_steps.cpp.
// A scale on another device than the gradients, as with parameters that are offloaded to the host:
// what the host reads has arrived. A scaler with a process group: it skips what another process
// finds, which is a backend that puts its own flag into the reduction.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/amp/grad_scaler.h>
#include <torchfuse/optim/fused_adam.h>

#include <cstdint>
#include <vector>

#include "../fake_group.h"
#include "../late_device.h"
#include "amp_testing.h"

namespace torchfuse::testing {
namespace {

using amp::GradScaler;
using amp::GradScalerOptions;
using optim::FusedAdam;
using optim::FusedAdamOptions;

TEST(GradScaler, ScalesOneAndManyTensors) {
  GradScaler scaler = make_scaler();
  const torch::Tensor weight = torch::full({3}, 2.0, torch::requires_grad());
  scaler.scale(weight.sum()).backward();
  EXPECT_TRUE(torch::equal(weight.grad(), torch::full({3}, 16.0)));
  const auto scaled =
      scaler.scale(std::vector<torch::Tensor>{torch::ones({}, torch::kHalf), torch::ones({2})});
  ASSERT_EQ(scaled.size(), 2U);
  EXPECT_EQ(scaled[0].scalar_type(), torch::kFloat);
  EXPECT_EQ(scaled[0].item<float>(), 16.0F);
  EXPECT_TRUE(torch::equal(scaled[1], torch::full({2}, 16.0)));
  expect_error([&] { scaler.scale(torch::Tensor()); },
               "GradScaler.scale: expected outputs to be a tensor, got an undefined one.");
}

TEST(GradScaler, ScaledLossesHaveGradientsOfGradients) {
  GradScaler scaler = make_scaler();
  const torch::Tensor weight = torch::full({3}, 2.0, torch::requires_grad());
  const auto grads = torch::autograd::grad({scaler.scale(weight.pow(3).sum())}, {weight}, {},
                                           /*retain_graph=*/true, /*create_graph=*/true);
  (grads[0] / 16).sum().backward();
  EXPECT_TRUE(torch::equal(weight.grad(), torch::full({3}, 12.0)));
}

TEST(GradScaler, TheScaleFollowsItsOptions) {
  using Options = GradScalerOptions;
  struct Case {
    Options options;
    std::vector<bool> overflows;
    std::vector<double> scales;
  };
  const std::vector<Case> cases{
      {Options().init_scale(16.0).growth_interval(2),
       {false, false, false, true, false, false},
       {16, 32, 32, 16, 16, 32}},
      {Options().init_scale(64.0).hysteresis(2),
       {true, false, true, true, false},
       {64, 64, 64, 32, 32}},
      {Options().init_scale(8.0).growth_interval(1).min_scale(3.0).max_scale(20.0),
       {true, true, true, false, false, false, false},
       {4, 3, 3, 6, 12, 20, 20}},
      // It stays where fp32 holds its reciprocal.
      {Options().init_scale(0x1p125).growth_interval(1), {false, false}, {0x1p126, 0x1p126}},
      {Options().init_scale(0x1p-100).growth_interval(1).backoff_factor(1e-46),
       {true, true, false},
       {0x1p-126, 0x1p-126, 0x1p-125}},
  };
  for (std::size_t index = 0; index < cases.size(); ++index) {
    const auto optimizer = kSgd(make_params());
    GradScaler scaler(torch::kCPU, cases[index].options);
    std::vector<double> scales;
    for (const bool overflow : cases[index].overflows) {
      iterate(scaler, *optimizer, overflow);
      scales.push_back(scaler.get_scale());
    }
    EXPECT_EQ(scales, cases[index].scales) << "case " << index;
  }
}

TEST(GradScaler, OverflowInOneOptimizerSkipsOnlyThatOne) {
  const auto first = make_params();
  const auto second = make_params();
  FusedAdam ours(first);
  torch::optim::SGD other(second, torch::optim::SGDOptions(0.1));
  GradScaler scaler = started_scaler();
  set_grads(first, 1);
  set_grads(second, 1);
  first[0].mutable_grad().view(-1)[0] = kInf;
  const auto first_before = copy_of(first);
  const auto second_before = copy_of(second);
  scaler.step(ours);
  scaler.step(other);
  scaler.update();
  expect_equal(first, first_before);
  EXPECT_FALSE(torch::equal(second[0], second_before[0]));
  EXPECT_EQ(scaler.get_scale(), 8.0);
}

/// A scaler whose scale, 16, is on the late device.
amp::GradScaler late_scaler() {
  amp::GradScaler scaler = make_scaler(16.0);
  scaler.scale(late_scalar(1.0));
  return scaler;
}

/// Gradients of parameters on the host, scaled by 16, with an overflow on request.
void set_scaled_grads(const std::vector<torch::Tensor>& params, bool overflow) {
  const torch::NoGradGuard no_grad;
  set_grads(params, 1);
  for (const torch::Tensor& param : params) param.mutable_grad().mul_(16.0);
  if (overflow) params[0].mutable_grad()[0][0] = kInf;
}

TEST(GradScalerDevices, ScalesOutputsOfTheHost) {
  EXPECT_EQ(late_scaler().scale(torch::ones({})).item<float>(), 16.0F);
}

/// A step of what `make` makes with scaled gradients is that of plain ones.
template <class Make>
void expect_unscaled(const Make& make, bool explicit_unscale) {
  const auto params = make_params();
  const auto reference = copy_of(params);
  auto optimizer = make(params);
  auto plain = make(reference);
  set_scaled_grads(params, /*overflow=*/false);
  set_grads(reference, 1);
  amp::GradScaler scaler = late_scaler();
  if (explicit_unscale) scaler.unscale_(optimizer);
  scaler.step(optimizer);
  plain.step();
  expect_equal(params, reference);
}

TEST(GradScalerDevices, UnscalesGradientsOfTheHost) {
  expect_unscaled([](const auto& params) { return torch::optim::SGD(params, 0.1); }, false);
  for (const bool explicit_unscale : {false, true}) {
    expect_unscaled([](const auto& params) { return FusedAdam(params, FusedAdamOptions(0.1)); },
                    explicit_unscale);
  }
}

TEST(GradScalerDevices, AnOverflowOnTheHostSkipsTheFusedStep) {
  for (const bool explicit_unscale : {false, true}) {
    const auto params = make_params();
    const auto before = copy_of(params);
    FusedAdam optimizer(params, FusedAdamOptions(0.1));
    set_scaled_grads(params, /*overflow=*/true);
    amp::GradScaler scaler = late_scaler();
    if (explicit_unscale) scaler.unscale_(optimizer);
    scaler.step(optimizer);
    expect_equal(params, before);
  }
}

TEST(GradScalerDevices, NothingIsCopiedToWhereTheScaleIsMade) {
  amp::ScalerExtras extras;
  extras.hysteresis = 2;
  extras.history_size = 3;
  amp::GradScalerCore core(extras);
  core.set_counts({5, 2, 1});
  const std::int64_t before = copies_from_host();
  core.initialize(late_device(), 16.0, 0);
  core.set_hysteresis_tracker(1);
  EXPECT_EQ(core.counts(), (std::vector<std::int64_t>{5, 2, 1}));
  core.set_counts({7, 3, 0});
  EXPECT_EQ(copies_from_host(), before);
  EXPECT_EQ(core.counts(), (std::vector<std::int64_t>{7, 3, 0}));
  EXPECT_EQ(core.hysteresis_tracker(), 1);
}

TEST(GradScalerDevices, CountsAndHistoryMoveWithTheScale) {
  amp::ScalerExtras extras;
  extras.hysteresis = 3;
  extras.history_size = 4;
  amp::GradScalerCore core(extras);
  core.initialize(torch::kCPU, 16.0, 0);
  core.update({torch::ones({})}, amp::ScaleRule());
  core.set_scale(late_scalar(8.0));
  core.inv_scale();
  EXPECT_EQ(core.step_counts().device(), late_device());
  EXPECT_EQ(core.counts(), (std::vector<std::int64_t>{1, 1, 1}));
  EXPECT_EQ(core.hysteresis_tracker(), 2);
  const auto history = core.scale_history();
  ASSERT_EQ(history.size(), 1U);
  EXPECT_EQ(history[0].scale, 16.0);
  EXPECT_TRUE(history[0].skipped);
}

TEST(GradScalerDevices, FlagsOfALateDeviceAreCombinedOnTheHost) {
  amp::GradScalerCore core;
  core.initialize(torch::kCPU, 16.0, 0);
  EXPECT_EQ(core.combine({late_scalar(1.0)}).item<float>(), 1.0F);
  EXPECT_EQ(core.combine({torch::zeros({}), late_scalar(1.0)}).item<float>(), 1.0F);
}

/// All reductions meet one other process, whose flag is `flag`.
class OtherProcess : public FakeBackend {
 public:
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    EXPECT_EQ(options.reduceOp, c10d::ReduceOp::MAX);
    EXPECT_EQ(tensors.size(), 1U);
    seen.push_back(tensors[0].item<float>());
    tensors[0].clamp_min_(flag);
    return work();
  }

  float flag = 0.0F;
  std::vector<float> seen;  ///< what this process brought
};

class GradScalerGroup : public ::testing::Test {
 protected:
  GradScaler scaler() const {
    return GradScaler(
        torch::kCPU, GradScalerOptions().init_scale(8.0).growth_interval(100).process_group(kName));
  }

  static constexpr const char* kName = "torchfuse_test_group";
  c10::intrusive_ptr<OtherProcess> other_ = c10::make_intrusive<OtherProcess>();
  RegisteredGroup group_{other_, kName};
};

TEST_F(GradScalerGroup, SkipsWhatAnotherProcessFinds) {
  for (const MakeOptimizer& make : {kFusedAdam, kSgd}) {
    for (const bool unscale : {false, true}) {
      const auto params = make_params();
      const auto optimizer = make(params);
      GradScaler scaler = this->scaler();
      other_->seen.clear();
      EXPECT_FALSE(iterate(scaler, *optimizer, /*overflow=*/false, unscale));
      other_->flag = 1.0F;
      EXPECT_TRUE(skips(scaler, *optimizer, unscale));
      EXPECT_EQ(scaler.get_scale(), 4.0);
      other_->flag = 0.0F;
      EXPECT_TRUE(iterate(scaler, *optimizer, /*overflow=*/true, unscale));
      EXPECT_EQ(scaler.get_scale(), 2.0);
      EXPECT_EQ(scaler.skipped_steps(), 2);
      EXPECT_EQ(other_->seen, (std::vector<float>{0, 0, 1})) << "one reduction for each iteration";
    }
  }
}

TEST_F(GradScalerGroup, AProcessWithoutGradientsTakesPart) {
  FusedAdam optimizer(make_params());
  GradScaler scaler = this->scaler();
  other_->flag = 1.0F;
  EXPECT_TRUE(skips(scaler, optimizer, /*unscale=*/false));
  EXPECT_EQ(other_->seen, (std::vector<float>{0}));
  EXPECT_EQ(scaler.get_scale(), 4.0);
}

}  // namespace
}  // namespace torchfuse::testing
