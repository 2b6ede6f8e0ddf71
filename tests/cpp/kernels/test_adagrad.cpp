// SPDX-License-Identifier: BSD-3-Clause
// The update driver with Adagrad.
#include "kernels/functors/adagrad.h"

#include <gtest/gtest.h>

#include "one_state_problem.h"

namespace torchfuse::kernels::testing {
namespace {

OneStateElement formula(const AdagradParams& group, double step, OneStateElement in, double grad) {
  const double decay = group.weight_decay.value * in.param;
  const double g = (group.maximize ? -grad : grad) + (group.adagrad_w_mode ? 0.0 : decay);
  in.state += g * g;
  const double direction =
      g / (std::sqrt(in.state) + group.eps.value) + (group.adagrad_w_mode ? decay : 0.0);
  in.param -= group.lr.value / (1.0 + (step - 1.0) * group.lr_decay.value) * direction;
  return in;
}

AdagradParams adagrad(int mode) {
  AdagradParams group;
  group.lr.value = 0.05;
  group.lr_decay.value = (mode & 1) != 0 ? 0.1 : 0.0;
  group.eps.value = 1e-10;
  group.weight_decay.value = 0.1;
  group.adagrad_w_mode = (mode & 2) != 0;
  group.maximize = (mode & 4) != 0;
  return group;
}

TEST(Adagrad, MatchesTheFp64Formula) {
  expect_one_state_matches_fp64<Adagrad>(adagrad, 8, formula);
}

TEST(Adagrad, EveryLevelAndEverySplitGivesTheSameBits) {
  for (const int mode : {1, 2}) expect_one_state_same_bits<Adagrad>(adagrad(mode));
}

}  // namespace
}  // namespace torchfuse::kernels::testing
