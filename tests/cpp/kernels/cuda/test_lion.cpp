// SPDX-License-Identifier: BSD-3-Clause
// The update kernels with Lion.
#include <gtest/gtest.h>

#include "kernels/functors/lion.h"
#include "one_state_on_device.h"

namespace torchfuse::kernels::testing {
namespace {

TEST(CudaLion, GivesTheBitsOfTheCpu) {
  std::vector<LionParams> groups(3);
  for (std::size_t i = 0; i < groups.size(); ++i) {
    groups[i].lr.value = 0.05;
    groups[i].beta1.value = 0.9;
    groups[i].beta2.value = 0.99;
    groups[i].weight_decay.value = i == 1 ? 0.1 : 0.0;
    groups[i].maximize = i == 2;
  }
  expect_one_state_bits_of_the_cpu<Lion>(groups);
}

}  // namespace
}  // namespace torchfuse::kernels::testing
