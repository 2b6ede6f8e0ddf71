// SPDX-License-Identifier: BSD-3-Clause
// The scaler's tensors on a device of their own.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/amp/grad_scaler_core.h>

#include <cstdint>
#include <vector>

#include "../late_device.h"

namespace torchfuse::testing {
namespace {

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

}  // namespace
}  // namespace torchfuse::testing
