// SPDX-License-Identifier: BSD-3-Clause
// The update driver with the Adam functor: against fp64, across levels, ranges, dtypes, alignments.
#include "kernels/functors/adam.h"

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <thread>

#include "kernel_test.h"
#include "kernels/fused_optimizer.h"
#include "recorded_results.h"

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
  std::optional<DType> square = {};  ///< of the second and third state, where it is another

  DType squares() const { return square.value_or(state); }
};

AdamParams default_params() {
  AdamParams params;
  params.lr.value = 1e-2;
  params.beta1.value = 0.9;
  params.beta2.value = 0.999;
  params.eps.value = 1e-8;
  params.weight_decay.value = 0.1;
  return params;
}

/// Tensors of several sizes with the same random content for the same seed.
struct Problem {
  explicit Problem(const Config& config, const std::vector<std::int64_t>& sizes) : config(config) {
    std::mt19937 random(7);
    for (const std::int64_t numel : sizes) {
      params.emplace_back(config.param, numel, config.offset);
      grads.emplace_back(config.grad, numel, config.offset);
      masters.emplace_back(DType::kFloat32, numel, config.offset);
      first.emplace_back(config.state, numel, config.offset);
      for (auto* list : {&second, &maximum})
        list->emplace_back(config.squares(), numel, config.offset);
      steps.push_back(std::make_unique<float>(3.0f));
      grads.back().fill_normal(random);
      masters.back().fill_normal(random);
      first.back().fill_normal(random, 0.1);
      second.back().fill_abs_normal(random, 0.01);
      maximum.back().fill_abs_normal(random, 0.01);
      for (std::int64_t i = 0; i < numel; ++i) params.back().set(i, masters.back().get(i));
      TensorRow row;
      row.param = params.back().data();
      row.grad = grads.back().data();
      row.state[0] = first.back().data();
      row.state[1] = second.back().data();
      row.state[2] = maximum.back().data();
      row.master = config.has_master ? masters.back().data() : nullptr;
      row.step = steps.back().get();
      row.numel = numel;
      rows.add(row);
    }
  }

  UpdateArgs<Adam> args(const AdamParams& group) const {
    UpdateArgs<Adam> result;
    result.tensors = rows.table(config.param, config.grad, config.state, config.has_master);
    result.tensors.state[1] = result.tensors.state[2] = config.squares();
    result.groups = &group;
    result.num_groups = 1;
    result.scalars = &scalars;
    result.write_back_grads = config.write_back;
    return result;
  }

  bool operator==(const Problem& other) const {
    return params == other.params && grads == other.grads && masters == other.masters &&
           first == other.first && second == other.second && maximum == other.maximum;
  }

  Config config;
  std::vector<Buffer> params, grads, masters, first, second, maximum;
  std::vector<std::unique_ptr<float>> steps;
  Rows rows;
  StepScalars scalars{0.5, 0.0f, 0.0f};
};

/// Adam in fp64 on one element, from the papers' formulas.
struct Expected {
  double param, m, v, v_max;
};

Expected reference(const AdamParams& group, double grad_coef, double step, Expected in,
                   double grad) {
  const double lr = group.lr.value;
  double g = grad * grad_coef * (group.maximize ? -1 : 1);
  if (!group.adam_w_mode) g += group.weight_decay.value * in.param;
  if (group.adam_w_mode) in.param *= 1 - lr * group.weight_decay.value;
  in.m = group.beta1.value * in.m + (1 - group.beta1.value) * g;
  in.v = group.beta2.value * in.v + (1 - group.beta2.value) * g * g;
  in.v_max = std::max(in.v_max, in.v);
  const double bias1 = group.bias_correction ? 1 - std::pow(group.beta1.value, step) : 1;
  const double bias2 = group.bias_correction ? 1 - std::pow(group.beta2.value, step) : 1;
  const double v = group.amsgrad ? in.v_max : in.v;
  in.param -= lr * (in.m / bias1) / (std::sqrt(v / bias2) + group.eps.value);
  return in;
}

void expect_matches_reference(const Config& config, const AdamParams& group, double tolerance) {
  const std::vector<std::int64_t> sizes{1003};
  const Problem before(config, sizes);
  Problem after(config, sizes);
  fused_update_cpu(detect_cpu_isa(), after.args(group), 0, 1003);
  for (std::int64_t i = 0; i < 1003; ++i) {
    const Buffer& start = config.has_master ? before.masters[0] : before.params[0];
    const Expected expected = reference(
        group, 0.5, 3.0,
        {start.get(i), before.first[0].get(i), before.second[0].get(i), before.maximum[0].get(i)},
        before.grads[0].get(i));
    ASSERT_NEAR(after.params[0].get(i), expected.param, tolerance * (1 + std::abs(expected.param)));
    ASSERT_NEAR(after.first[0].get(i), expected.m, tolerance * (1 + std::abs(expected.m)));
    ASSERT_NEAR(after.second[0].get(i), expected.v, tolerance * (1 + std::abs(expected.v)));
    if (group.amsgrad) {
      ASSERT_NEAR(after.maximum[0].get(i), expected.v_max, tolerance * (1 + expected.v_max));
    } else {
      ASSERT_EQ(after.maximum[0].get(i), before.maximum[0].get(i)) << "an unused state was written";
    }
  }
}

TEST(Adam, MatchesFp64FormulasInEveryMode) {
  for (int mode = 0; mode < 16; ++mode) {
    AdamParams group = default_params();
    group.adam_w_mode = (mode & 1) != 0;
    group.amsgrad = (mode & 2) != 0;
    group.maximize = (mode & 4) != 0;
    group.bias_correction = (mode & 8) != 0;
    SCOPED_TRACE(mode);
    expect_matches_reference({}, group, 1e-6);
    const DType wide = DType::kFloat64;
    expect_matches_reference({wide, wide, wide}, group, 1e-14);
  }
}

TEST(Adam, MatchesFp64FormulasInEveryStorage) {
  const DType f32 = DType::kFloat32;
  for (const DType narrow : {DType::kFloat16, DType::kBFloat16}) {
    const double tolerance = narrow == DType::kFloat16 ? 6e-4 : 5e-3;
    expect_matches_reference({narrow, narrow, f32}, default_params(), tolerance);
    expect_matches_reference({narrow, narrow, narrow}, default_params(), tolerance);
    expect_matches_reference({narrow, f32, f32, true}, default_params(), tolerance);
    expect_matches_reference({f32, narrow, f32}, default_params(), 1e-6);
    expect_matches_reference({f32, f32, narrow}, default_params(), tolerance);
    expect_matches_reference({narrow, f32, f32, true, false, 0, narrow}, default_params(),
                             tolerance);
  }
}

std::vector<Config> every_config() {
  std::vector<Config> configs;
  const DType f32 = DType::kFloat32;
  for (const DType param : {f32, DType::kFloat16, DType::kBFloat16}) {
    for (const DType grad : {f32, DType::kFloat16, DType::kBFloat16}) {
      for (const DType state : {f32, param}) {
        configs.push_back({param, grad, state, false, true, 1});
        if (param != f32) configs.push_back({param, grad, state, true, false, 0});
      }
      for (const DType square : {f32, DType::kFloat16, DType::kBFloat16}) {
        configs.push_back({param, grad, DType::kBFloat16, false, false, 1, square});
        configs.push_back({param, grad, DType::kFloat16, param != f32, true, 0, square});
      }
    }
  }
  configs.push_back({DType::kFloat64, DType::kFloat64, DType::kFloat64, false, true, 1});
  return configs;
}

TEST(Adam, EveryLevelAndEverySplitGivesTheSameBits) {
  AdamParams group = default_params();
  group.amsgrad = true;
  for (const Config& config : every_config()) {
    const auto sizes = testing::interesting_sizes();
    Problem whole(config, sizes);
    const std::int64_t total = whole.rows.offsets.back();
    fused_update_cpu(CpuIsa::kBaseline, whole.args(group), 0, total);
    testing::record(whole.params, whole.grads, whole.masters, whole.first, whole.second,
                    whole.maximum);
    for (const CpuIsa isa : testing::levels_here()) {
      Problem split(config, sizes);
      for (std::int64_t begin = 0; begin < total; begin += 7919) {
        fused_update_cpu(isa, split.args(group), begin, std::min(total, begin + 7919));
      }
      ASSERT_TRUE(split == whole) << name_of(isa);
    }
  }
}

TEST(Adam, ThreadsMayShareATable) {
  const Config config{DType::kBFloat16, DType::kFloat32, DType::kFloat32, true, false, 1};
  const std::vector<std::int64_t> sizes(200, 333);
  const AdamParams group = default_params();
  Problem alone(config, sizes);
  Problem shared(config, sizes);
  const std::int64_t total = alone.rows.offsets.back();
  fused_update_cpu(detect_cpu_isa(), alone.args(group), 0, total);
  const UpdateArgs<Adam> args = shared.args(group);
  std::vector<std::thread> threads;
  for (std::int64_t t = 0; t < 4; ++t) {
    threads.emplace_back(
        [&, t] { fused_update_cpu(detect_cpu_isa(), args, total * t / 4, total * (t + 1) / 4); });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(shared == alone);
}

TEST(Adam, LeavesEverythingWhenSkipped) {
  for (const float skip : {1.0f, 2.0f}) {
    const Problem before({}, {100});
    Problem after({}, {100});
    after.scalars.skip = skip;
    fused_update_cpu(detect_cpu_isa(), after.args(default_params()), 0, 100);
    EXPECT_TRUE(after == before);
  }
}

TEST(Adam, ReadsHyperParametersThroughPointers) {
  AdamParams by_value = default_params();
  AdamParams by_pointer = default_params();
  const float lr = static_cast<float>(by_value.lr.value);
  by_value.lr.value = static_cast<double>(lr);
  by_pointer.lr.value = -1;
  by_pointer.lr.pointer = &lr;
  Problem a({}, {100});
  Problem b({}, {100});
  fused_update_cpu(detect_cpu_isa(), a.args(by_value), 0, 100);
  fused_update_cpu(detect_cpu_isa(), b.args(by_pointer), 0, 100);
  EXPECT_TRUE(a == b);
}

TEST(Adam, FlushesDenormalsAndRestoresTheMode) {
  Problem problem({}, {64});
  for (std::int64_t i = 0; i < 64; ++i) {
    problem.first[0].set(i, 1e-40);
    problem.grads[0].set(i, 0.0);
  }
  fused_update_cpu(detect_cpu_isa(), problem.args(default_params()), 0, 64);
  for (std::int64_t i = 0; i < 64; ++i) EXPECT_EQ(problem.first[0].get(i), 0.0);
  volatile float denormal = 1e-40f;
  EXPECT_NE(denormal * 0.5f, 0.0f) << "the caller's floating-point mode was changed";
}

}  // namespace
}  // namespace torchfuse::kernels
