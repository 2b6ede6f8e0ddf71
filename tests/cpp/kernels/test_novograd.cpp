// SPDX-License-Identifier: BSD-3-Clause
// The three phases of NovoGrad, and the number that it tracks for each tensor.
#include "kernels/functors/novograd.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "one_norm_checks.h"

namespace torchfuse::kernels::testing {
namespace {

double largest_of(const std::vector<double>& values) {
  double largest = 0.0;
  for (const double value : values) largest = std::max(largest, std::abs(value));
  return largest;
}

void formula(const NovoGradParams& group, double step, OneNormTensor& tensor) {
  const double b1 = group.beta1.value;
  const double b2 = group.beta2.value;
  const double norm = group.inf_norm ? largest_of(tensor.grad) : norm_of(tensor.grad);
  double& n = tensor.tracked;
  if (step == 1.0 && !group.init_zero) {
    n = norm;
  } else if (group.inf_norm) {
    n = b2 * n + (1 - b2) * norm;
  } else {
    n = std::sqrt(b2 * n * n + (1 - b2) * norm * norm);
  }
  const double bias1 = group.bias_correction ? 1 - std::pow(b1, step) : 1.0;
  const double bias2 = group.bias_correction ? 1 - std::pow(b2, step) : 1.0;
  const double denominator = n / std::sqrt(bias2) + group.eps.value;
  const double share = group.grad_averaging ? 1 - b1 : 1.0;
  const double lr = group.lr.value;
  for (std::size_t i = 0; i < tensor.param.size(); ++i) {
    const double g = group.maximize ? -tensor.grad[i] : tensor.grad[i];
    const double decay = group.weight_decay.value * tensor.param[i];
    double& m = tensor.state[i];
    m = b1 * m + share * (group.reg_inside_moment ? g / denominator + decay : g);
    tensor.param[i] -=
        group.reg_inside_moment ? lr * m / bias1 : lr * (m / bias1 / denominator + decay);
  }
}

TEST(NovoGrad, MatchesTheFp64Formula) {
  expect_one_norm_matches_fp64<NovoGrad>(novograd, 16, formula);
}

TEST(NovoGrad, EveryLevelAndEverySplitGivesTheSameBits) {
  for (const int mode : {0, 6, 9}) expect_one_norm_same_bits<NovoGrad>(novograd(mode));
}

TEST(NovoGrad, ASkippedStepChangesNothing) { expect_one_norm_skipped<NovoGrad>(novograd(1)); }

TEST(NovoGrad, TheNormOfVeryLargeAndVerySmallNumbersIsExact) {
  const NovoGradParams group = novograd(0);
  for (const double scale : {1e300, 1.0, 1e-300}) {
    const double n = NovoGrad::track(group, 2.0, 4.0 * scale, 0.0, 3.0 * scale);
    EXPECT_NEAR(n / scale, std::sqrt(0.98 * 9.0 + 0.02 * 16.0), 1e-14);
  }
  EXPECT_EQ(NovoGrad::track(group, 2.0, 0.0, 0.0, 0.0), 0.0);
  EXPECT_EQ(NovoGrad::track(group, 1.0, 4.0, 2.0, 3.0), 4.0);
  EXPECT_TRUE(std::isnan(NovoGrad::track(group, 2.0, NAN, NAN, 3.0)));
}

}  // namespace
}  // namespace torchfuse::kernels::testing
