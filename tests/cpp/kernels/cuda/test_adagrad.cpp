// SPDX-License-Identifier: BSD-3-Clause
// The update kernels with Adagrad.
#include <gtest/gtest.h>

#include "kernels/functors/adagrad.h"
#include "one_state_on_device.h"

namespace torchfuse::kernels::testing {
namespace {

TEST(CudaAdagrad, GivesTheBitsOfTheCpu) {
  std::vector<AdagradParams> groups(3);
  for (std::size_t i = 0; i < groups.size(); ++i) {
    groups[i].lr.value = 0.05;
    groups[i].lr_decay.value = 0.1 * static_cast<double>(i);
    groups[i].eps.value = 1e-10;
    groups[i].weight_decay.value = 0.1;
    groups[i].adagrad_w_mode = i == 1;
    groups[i].maximize = i == 2;
  }
  expect_one_state_bits_of_the_cpu<Adagrad>(groups);
}

}  // namespace
}  // namespace torchfuse::kernels::testing
