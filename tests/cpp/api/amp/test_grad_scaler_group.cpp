// SPDX-License-Identifier: BSD-3-Clause
// A scaler with a process group: it skips what another process finds. The other process is a
// backend that puts its own flag into the reduction.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/amp/grad_scaler.h>
#include <torchfuse/optim/fused_adam.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "../optim/optim_testing.h"
#include "amp_testing.h"

namespace torchfuse::testing {
namespace {

using amp::GradScaler;
using amp::GradScalerOptions;
using optim::FusedAdam;
using optim::FusedAdamOptions;

class FinishedMaximum : public c10d::Work {
 public:
  bool isCompleted() override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
};

/// All reductions meet one other process, whose flag is `flag`.
class OtherProcess : public c10d::Backend {
 public:
  OtherProcess() : c10d::Backend(/*rank=*/0, /*size=*/2) {}
  const std::string getBackendName() const override { return "other process"; }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    EXPECT_EQ(options.reduceOp, c10d::ReduceOp::MAX);
    EXPECT_EQ(tensors.size(), 1U);
    seen.push_back(tensors[0].item<float>());
    tensors[0].clamp_min_(flag);
    return c10::make_intrusive<FinishedMaximum>();
  }

  float flag = 0.0F;
  std::vector<float> seen;  ///< what this process brought
};

class GradScalerGroup : public ::testing::Test {
 protected:
  void SetUp() override {
    other_ = c10::make_intrusive<OtherProcess>();
    // The registry does not keep it alive.
    group_ = c10::make_intrusive<c10d::ProcessGroup>(/*rank=*/0, /*size=*/2);
    group_->setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::CUSTOM, other_);
    group_->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
    group_->setGroupName(kName);
    c10d::register_process_group(kName, group_);
  }
  void TearDown() override { c10d::unregister_process_group(kName); }

  GradScaler scaler() const {
    return GradScaler(
        torch::kCPU, GradScalerOptions().init_scale(8.0).growth_interval(100).process_group(kName));
  }

  /// One iteration; whether the parameters stayed as they were.
  static bool skips(GradScaler& scaler, torch::optim::Optimizer& optimizer, bool unscale) {
    const auto& params = optimizer.param_groups()[0].params();
    scaler.scale(torch::zeros({}));
    const auto before = copies(params);
    if (unscale) scaler.unscale_(optimizer);
    scaler.step(optimizer);
    scaler.update();
    return torch::equal(before[0], params[0]);
  }

  static constexpr const char* kName = "torchfuse_test_group";
  c10::intrusive_ptr<OtherProcess> other_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

TEST_F(GradScalerGroup, SkipsWhatAnotherProcessFinds) {
  for (const bool fused : {false, true}) {
    for (const bool unscale : {false, true}) {
      const auto params = make_params();
      std::unique_ptr<torch::optim::Optimizer> optimizer;
      if (fused) optimizer = std::make_unique<FusedAdam>(params, FusedAdamOptions(0.1));
      if (!fused) {
        optimizer = std::make_unique<torch::optim::SGD>(params, torch::optim::SGDOptions(0.1));
      }
      GradScaler scaler = this->scaler();
      other_->seen.clear();
      set_grads(params, 1);
      EXPECT_FALSE(skips(scaler, *optimizer, unscale));
      other_->flag = 1.0F;
      EXPECT_TRUE(skips(scaler, *optimizer, unscale));
      EXPECT_EQ(scaler.get_scale(), 4.0);
      other_->flag = 0.0F;
      set_grads(params, 2);
      params[0].mutable_grad().view(-1)[0] = kInf;
      EXPECT_TRUE(skips(scaler, *optimizer, unscale));
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
