// SPDX-License-Identifier: BSD-3-Clause
// The three phases of NovoGrad and LARS: against fp64, across levels, ranges, dtypes and
// alignments.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "kernel_test.h"
#include "kernels/functors/lars.h"
#include "kernels/functors/novograd.h"
#include "kernels/layerwise_optimizer.h"
#include "kernels/multi_tensor_l2_norm.h"

namespace torchfuse::kernels {
namespace {

using testing::Buffer;
using testing::Rows;

struct Config {
  DType param = DType::kFloat32;
  DType grad = DType::kFloat32;
  DType state = DType::kFloat32;
  bool has_master = false;
  bool write_back = false;
  std::int64_t offset = 0;
};

/// Tensors of several sizes, all in their `step`-th step, with running norms of their own.
struct Problem {
  Problem(const Config& config, const std::vector<std::int64_t>& sizes, float step = 3.0f)
      : config(config), step(std::make_unique<float>(step)) {
    const DType wide = config.param == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
    std::mt19937 random(7);
    for (const std::int64_t numel : sizes) {
      params.emplace_back(config.param, numel, config.offset);
      grads.emplace_back(config.grad, numel, config.offset);
      masters.emplace_back(DType::kFloat32, numel, config.offset);
      states.emplace_back(config.state, numel, config.offset);
      tracked.emplace_back(wide, 1);
      grads.back().fill_normal(random);
      masters.back().fill_normal(random);
      states.back().fill_normal(random);
      tracked.back().set(0, 1.5);
      for (std::int64_t i = 0; i < numel; ++i) params.back().set(i, masters.back().get(i));
      TensorRow row;
      row.param = params.back().data();
      row.grad = grads.back().data();
      row.state[0] = states.back().data();
      row.master = config.has_master ? masters.back().data() : nullptr;
      row.step = this->step.get();
      row.tensor_state = tracked.back().data();
      row.numel = numel;
      rows.add(row);
      slots.push_back(slots.back() + (numel + kNormChunk - 1) / kNormChunk);
    }
    norms.resize(2 * sizes.size());
    partials.resize(2 * static_cast<std::size_t>(slots.back()));
  }

  /// All phases, the two over elements in ranges of at most `span`.
  template <class Functor>
  void update(const typename Functor::Params& group, CpuIsa isa = detect_cpu_isa(),
              std::int64_t span = std::numeric_limits<std::int64_t>::max()) {
    UpdateArgs<Functor> args;
    args.tensors = rows.table(config.param, config.grad, config.state, config.has_master);
    args.groups = &group;
    args.num_groups = 1;
    args.scalars = &scalars;
    args.write_back_grads = config.write_back;
    args.norms = norms.data();
    const MeasureArgs<Functor> measure{args, slots.data(), partials.data(), norms.data()};
    const std::int64_t total = rows.offsets.back();
    const auto in_ranges = [&](const auto& run) {
      for (std::int64_t begin = 0; begin < total;) {
        const std::int64_t end = total - begin > span ? begin + span : total;
        run(begin, end);
        begin = end;
      }
    };
    in_ranges(
        [&](std::int64_t b, std::int64_t e) { fused_measure_cpu<Functor>(isa, measure, b, e); });
    tensor_norms<Functor>(measure, 0, static_cast<std::int64_t>(rows.rows.size()));
    in_ranges([&](std::int64_t b, std::int64_t e) { fused_update_cpu<Functor>(isa, args, b, e); });
  }

  bool operator==(const Problem& other) const {
    return params == other.params && grads == other.grads && masters == other.masters &&
           states == other.states && tracked == other.tracked;
  }

  Config config;
  std::vector<Buffer> params, grads, masters, states, tracked;
  std::unique_ptr<float> step;
  Rows rows;
  std::vector<std::int64_t> slots{0};
  std::vector<double> norms;
  std::vector<MeasurePartial> partials;
  StepScalars scalars{0.5, 0.0f, 0.0f};
};

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
void expect_matches_reference(const Config& config, const typename Functor::Params& group,
                              float step, double tolerance) {
  for (const std::int64_t numel : {std::int64_t{1003}, 2 * kNormChunk + 77}) {
    const Problem before(config, {numel}, step);
    Problem after(config, {numel}, step);
    after.update<Functor>(group);
    const Buffer& start = config.has_master ? before.masters[0] : before.params[0];
    Expected exact;
    for (std::int64_t i = 0; i < numel; ++i) {
      exact.param.push_back(start.get(i));
      exact.grad.push_back(0.5 * before.grads[0].get(i));
      exact.state.push_back(before.states[0].get(i));
    }
    exact.tracked = before.tracked[0].get(0);
    reference(group, step, exact);
    for (std::int64_t i = 0; i < numel; ++i) {
      const double p = exact.param[static_cast<std::size_t>(i)];
      const double s = exact.state[static_cast<std::size_t>(i)];
      ASSERT_NEAR(after.params[0].get(i), p, tolerance * (1 + std::abs(p)));
      ASSERT_NEAR(after.states[0].get(i), s, tolerance * (1 + std::abs(s)));
    }
    const double narrow = config.param == DType::kFloat64 ? 1e-14 : 1e-6;
    ASSERT_NEAR(after.tracked[0].get(0), exact.tracked, narrow * exact.tracked);
  }
}

NovoGradParams novograd(int mode) {
  NovoGradParams group;
  group.lr.value = 0.05;
  group.beta1.value = 0.9;
  group.beta2.value = 0.98;
  group.eps.value = 1e-8;
  group.weight_decay.value = 0.1;
  group.bias_correction = (mode & 1) == 0;
  group.reg_inside_moment = (mode & 2) != 0;
  group.inf_norm = (mode & 4) != 0;
  group.init_zero = (mode & 8) != 0;
  group.grad_averaging = (mode & 1) == 0;
  group.maximize = (mode & 8) != 0;
  return group;
}

LarsParams lars(int mode) {
  LarsParams group;
  group.lr.value = 2.0;
  group.momentum.value = (mode & 1) != 0 ? 0.9 : 0.5;
  group.weight_decay.value = (mode & 2) != 0 ? 0.1 : 0.0;
  group.trust_coefficient.value = 0.01;
  group.eps.value = 1e-8;
  group.nesterov = (mode & 1) != 0;
  group.maximize = (mode & 2) != 0;
  return group;
}

/// In every mode in fp32 and fp64, in the first step and later; in every storage.
template <class Functor, class Group>
void expect_matches_fp64(Group group_of, int modes) {
  const DType wide = DType::kFloat64;
  for (int mode = 0; mode < modes; ++mode) {
    SCOPED_TRACE(mode);
    for (const float step : {1.0f, 2.0f, 70.0f}) {
      expect_matches_reference<Functor>({}, group_of(mode), step, 1e-6);
      expect_matches_reference<Functor>({wide, wide, wide}, group_of(mode), step, 1e-14);
    }
  }
  const DType f32 = DType::kFloat32;
  for (const DType narrow : {DType::kFloat16, DType::kBFloat16}) {
    const double tolerance = narrow == DType::kFloat16 ? 6e-4 : 5e-3;
    expect_matches_reference<Functor>({narrow, narrow, f32}, group_of(1), 2.0f, tolerance);
    expect_matches_reference<Functor>({narrow, narrow, narrow}, group_of(1), 2.0f, tolerance);
    expect_matches_reference<Functor>({narrow, f32, f32, true}, group_of(1), 2.0f, tolerance);
    expect_matches_reference<Functor>({f32, narrow, f32}, group_of(1), 2.0f, 1e-6);
  }
}

TEST(NovoGrad, MatchesTheFp64Formula) { expect_matches_fp64<NovoGrad>(novograd, 16); }
TEST(Lars, MatchesTheFp64Formula) { expect_matches_fp64<Lars>(lars, 4); }

template <class Functor>
void expect_same_bits_everywhere(const typename Functor::Params& group) {
  const DType f32 = DType::kFloat32;
  const DType f64 = DType::kFloat64;
  std::vector<Config> configs{{f64, f64, f64, false, true, 1}};
  for (const DType param : {f32, DType::kFloat16, DType::kBFloat16}) {
    for (const DType grad : {f32, param}) {
      configs.push_back({param, grad, f32, false, true, 1});
      configs.push_back({param, grad, param, false, false, 1});
      if (param != f32) configs.push_back({param, grad, f32, true, false, 0});
    }
  }
  for (const Config& config : configs) {
    const auto sizes = testing::interesting_sizes();
    Problem whole(config, sizes);
    whole.update<Functor>(group, CpuIsa::kBaseline);
    for (const CpuIsa isa : testing::levels_here()) {
      Problem split(config, sizes);
      split.update<Functor>(group, isa, 7919);
      ASSERT_TRUE(split == whole) << name_of(isa);
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
  Problem problem({}, testing::interesting_sizes());
  const Problem before({}, testing::interesting_sizes());
  problem.scalars.skip = 1.0f;
  problem.update<Functor>(group);
  EXPECT_TRUE(problem == before);
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
}  // namespace torchfuse::kernels
