// SPDX-License-Identifier: BSD-3-Clause
// The kernels of LARS.
#include <gtest/gtest.h>

#include "kernels/functors/lars.h"
#include "one_norm_on_device.h"

namespace torchfuse::kernels::testing {
namespace {

TEST(CudaLars, GivesTheBitsOfTheCpu) {
  expect_one_norm_bits_in_every_storage<Lars>({lars(0), lars(3)});
}

}  // namespace
}  // namespace torchfuse::kernels::testing
