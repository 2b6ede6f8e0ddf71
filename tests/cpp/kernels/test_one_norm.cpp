// SPDX-License-Identifier: BSD-3-Clause
// The three phases of NovoGrad and LARS: against fp64, across levels, ranges, dtypes and
// alignments.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "one_norm_problem.h"

namespace torchfuse::kernels::testing {
namespace {

using Streams = OneNormStreams<Buffer>;

/// One step on the CPU.
template <class Functor>
std::vector<Streams> stepped(const LayerwiseTuple& tuple, const std::vector<std::int64_t>& sizes,
                             const typename Functor::Params& group, float step,
                             CpuIsa isa = detect_cpu_isa(),
                             std::int64_t span = std::int64_t{1} << 40, std::int64_t offset = 0,
                             float skip = 0.0f) {
  std::vector<Streams> list = one_norm_contents(tuple, sizes, offset);
  OneNormProblem<Functor, Buffer> problem(tuple, list, &step, {group});
  problem.write_back = offset != 0;
  problem.run_on_cpu({0.5, 0.0f, skip}, isa, span);
  return list;
}

/// One tensor in fp64; the gradient is unscaled.
struct Expected {
  std::vector<double> param, grad, state;
  double tracked;
};

double norm_of(const std::vector<double>& values) {
  double sum = 0.0;
  for (const double value : values) sum += value * value;
  return std::sqrt(sum);
}

double largest_of(const std::vector<double>& values) {
  double largest = 0.0;
  for (const double value : values) largest = std::max(largest, std::abs(value));
  return largest;
}

void reference(const NovoGradParams& group, double step, Expected& tensor) {
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

void reference(const LarsParams& group, double /*step*/, Expected& tensor) {
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

template <class Functor>
void expect_matches_reference(const LayerwiseTuple& tuple, const typename Functor::Params& group,
                              float step, double tolerance) {
  for (const std::int64_t numel : {std::int64_t{1003}, 2 * kNormChunk + 77}) {
    const Streams before = one_norm_contents(tuple, {numel})[0];
    const Streams after = stepped<Functor>(tuple, {numel}, group, step)[0];
    const Buffer& start = tuple.has_master ? before.master : before.param;
    Expected exact;
    for (std::int64_t i = 0; i < numel; ++i) {
      exact.param.push_back(start.get(i));
      exact.grad.push_back(0.5 * before.grad.get(i));
      exact.state.push_back(before.state.get(i));
    }
    exact.tracked = before.tracked.get(0);
    reference(group, step, exact);
    for (std::int64_t i = 0; i < numel; ++i) {
      const double p = exact.param[static_cast<std::size_t>(i)];
      const double s = exact.state[static_cast<std::size_t>(i)];
      ASSERT_NEAR(after.param.get(i), p, tolerance * (1 + std::abs(p)));
      ASSERT_NEAR(after.state.get(i), s, tolerance * (1 + std::abs(s)));
    }
    const double narrow = tuple.param == DType::kFloat64 ? 1e-14 : 1e-6;
    ASSERT_NEAR(after.tracked.get(0), exact.tracked, narrow * exact.tracked);
  }
}

/// In every mode in fp32 and fp64, in the first step and later; in every storage.
template <class Functor, class Group>
void expect_matches_fp64(Group group_of, int modes) {
  const DType f32 = DType::kFloat32;
  const DType wide = DType::kFloat64;
  for (int mode = 0; mode < modes; ++mode) {
    SCOPED_TRACE(mode);
    for (const float step : {1.0f, 2.0f, 70.0f}) {
      expect_matches_reference<Functor>({f32, f32, f32, false}, group_of(mode), step, 1e-6);
      expect_matches_reference<Functor>({wide, wide, wide, false}, group_of(mode), step, 1e-14);
    }
  }
  for (const LayerwiseTuple& tuple : layerwise_tuples()) {
    if (tuple.param == wide) continue;
    const bool bf16 = tuple.param == DType::kBFloat16 || tuple.state == DType::kBFloat16;
    const double tolerance = tuple.param == f32 ? 1e-6 : bf16 ? 5e-3 : 6e-4;
    expect_matches_reference<Functor>(tuple, group_of(1), 2.0f, tolerance);
  }
}

TEST(NovoGrad, MatchesTheFp64Formula) { expect_matches_fp64<NovoGrad>(novograd, 16); }
TEST(Lars, MatchesTheFp64Formula) { expect_matches_fp64<Lars>(lars, 4); }

template <class Functor>
void expect_same_bits_everywhere(const typename Functor::Params& group) {
  const auto sizes = interesting_sizes();
  for (const LayerwiseTuple& tuple : layerwise_tuples()) {
    for (const std::int64_t offset : {0, 1}) {
      const auto whole = stepped<Functor>(tuple, sizes, group, 3.0f, CpuIsa::kBaseline,
                                          std::int64_t{1} << 40, offset);
      for (const CpuIsa isa : levels_here()) {
        ASSERT_TRUE(stepped<Functor>(tuple, sizes, group, 3.0f, isa, 7919, offset) == whole)
            << name_of(isa);
      }
    }
  }
}

TEST(NovoGrad, EveryLevelAndEverySplitGivesTheSameBits) {
  for (const int mode : {0, 6, 9}) expect_same_bits_everywhere<NovoGrad>(novograd(mode));
}

TEST(Lars, EveryLevelAndEverySplitGivesTheSameBits) {
  for (const int mode : {0, 3}) expect_same_bits_everywhere<Lars>(lars(mode));
}

template <class Functor>
void expect_skipped(const typename Functor::Params& group) {
  const LayerwiseTuple tuple = layerwise_tuples()[0];
  const auto after = stepped<Functor>(tuple, interesting_sizes(), group, 1.0f, detect_cpu_isa(),
                                      std::int64_t{1} << 40, 0, 1.0f);
  EXPECT_TRUE(after == one_norm_contents(tuple, interesting_sizes()));
}

TEST(NovoGrad, ASkippedStepChangesNothing) { expect_skipped<NovoGrad>(novograd(1)); }
TEST(Lars, ASkippedStepChangesNothing) { expect_skipped<Lars>(lars(1)); }

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
