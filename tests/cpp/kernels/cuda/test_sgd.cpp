// SPDX-License-Identifier: BSD-3-Clause
// The update kernels with SGD, and without the state where there is no momentum.
#include <gtest/gtest.h>

#include "kernels/functors/sgd.h"
#include "one_state_on_device.h"

namespace torchfuse::kernels::testing {
namespace {

std::vector<SgdParams> sgd_groups() {
  std::vector<SgdParams> groups(5);
  for (std::size_t i = 0; i < groups.size(); ++i) {
    groups[i].lr.value = 0.05 + 0.01 * static_cast<double>(i);
    groups[i].momentum.value = i == 0 ? 0.0 : 0.9;
    groups[i].dampening.value = i == 1 || i == 2 ? 0.25 : 0.0;
    groups[i].weight_decay.value = 0.1;
    groups[i].nesterov = i == 2;
    groups[i].wd_after_momentum = i == 3;
    groups[i].maximize = i == 4;
  }
  return groups;
}

TEST(CudaSgd, GivesTheBitsOfTheCpu) { expect_one_state_bits_of_the_cpu<Sgd>(sgd_groups()); }

TEST(CudaSgd, WithoutMomentumThereIsNoState) {
  expect_one_state_bits_of_the_cpu<Sgd>({sgd_groups().front()});
}

TEST(CudaSgd, ReadsItsMomentumFromTheDevice) {
  for (const float value : {0.0f, 0.5f}) {
    const DeviceArray<float> momentum({value});
    std::vector<SgdParams> by_pointer = sgd_groups();
    std::vector<SgdParams> by_value = sgd_groups();
    for (SgdParams& group : by_pointer) group.momentum.pointer = momentum.data();
    for (SgdParams& group : by_value) group.momentum.value = static_cast<double>(value);
    const DType f32 = DType::kFloat32;
    expect_one_state_bits_of_the_cpu<Sgd>({f32, f32, f32, false}, by_value, by_pointer, true, 3);
  }
}

}  // namespace
}  // namespace torchfuse::kernels::testing
