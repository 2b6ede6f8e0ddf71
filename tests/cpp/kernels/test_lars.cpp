// SPDX-License-Identifier: BSD-3-Clause
// The three phases of LARS.
#include "kernels/functors/lars.h"

#include <gtest/gtest.h>

#include "one_norm_checks.h"

namespace torchfuse::kernels::testing {
namespace {

void formula(const LarsParams& group, double /*step*/, OneNormTensor& tensor) {
  const double size = norm_of(tensor.param);
  const double slope = norm_of(tensor.grad);
  const double decay = group.weight_decay.value;
  double rate = group.lr.value;
  if (size > 0.0 && slope > 0.0) {
    rate *= group.trust_coefficient.value * size / (slope + decay * size + group.eps.value);
  }
  for (std::size_t i = 0; i < tensor.param.size(); ++i) {
    const double g = group.maximize ? -tensor.grad[i] : tensor.grad[i];
    const double change = rate * (g + decay * tensor.param[i]);
    double& b = tensor.state[i];
    b = group.momentum.value * b + change;
    tensor.param[i] -= group.nesterov ? change + group.momentum.value * b : b;
  }
}

TEST(Lars, MatchesTheFp64Formula) { expect_one_norm_matches_fp64<Lars>(lars, 4, formula); }

TEST(Lars, EveryLevelAndEverySplitGivesTheSameBits) {
  for (const int mode : {0, 3}) expect_one_norm_same_bits<Lars>(lars(mode));
}

TEST(Lars, ASkippedStepChangesNothing) { expect_one_norm_skipped<Lars>(lars(1)); }

}  // namespace
}  // namespace torchfuse::kernels::testing
