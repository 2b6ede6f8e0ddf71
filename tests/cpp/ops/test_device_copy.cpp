// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/device_copy.h>

#include "../api/late_device.h"

namespace torchfuse::testing {
namespace {

TEST(DeviceCopy, TheHostWaitsForWhatItReads) {
  const torch::Tensor there = late_scalar(3.0);
  const torch::Tensor here = to_device(there, torch::kCPU);
  EXPECT_TRUE(here.is_cpu());
  EXPECT_EQ(here.item<float>(), 3.0F);
  EXPECT_EQ(to_device(to_device(here, late_device()), torch::kCPU).item<float>(), 3.0F);
}

TEST(DeviceCopy, TensorsThatAreThereStayWhatTheyAre) {
  const torch::Tensor here = torch::ones({2});
  EXPECT_TRUE(to_device(here, torch::kCPU).is_same(here));
  const torch::Tensor there = late_scalar(3.0);
  EXPECT_TRUE(to_device(there, late_device()).is_same(there));
}

}  // namespace
}  // namespace torchfuse::testing
