// SPDX-License-Identifier: BSD-3-Clause
// The update driver with functors of one state, SGD and Adagrad: against fp64, across levels,
// ranges, dtypes and alignments, and without the state where SGD has no momentum.
#include <gtest/gtest.h>

#include <limits>
#include <memory>

#include "kernel_test.h"
#include "kernels/functors/adagrad.h"
#include "kernels/functors/sgd.h"
#include "kernels/fused_optimizer.h"

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

/// Tensors of several sizes with the same random content, all in their `step`-th step.
struct Problem {
  Problem(const Config& config, const std::vector<std::int64_t>& sizes, float step = 3.0f)
      : config(config), step(std::make_unique<float>(step)) {
    std::mt19937 random(7);
    for (const std::int64_t numel : sizes) {
      params.emplace_back(config.param, numel, config.offset);
      grads.emplace_back(config.grad, numel, config.offset);
      masters.emplace_back(DType::kFloat32, numel, config.offset);
      states.emplace_back(config.state, numel, config.offset);
      grads.back().fill_normal(random);
      masters.back().fill_normal(random);
      states.back().fill_abs_normal(random);
      for (std::int64_t i = 0; i < numel; ++i) params.back().set(i, masters.back().get(i));
      TensorRow row;
      row.param = params.back().data();
      row.grad = grads.back().data();
      row.state[0] = states.back().data();
      row.master = config.has_master ? masters.back().data() : nullptr;
      row.step = this->step.get();
      row.numel = numel;
      rows.add(row);
    }
  }

  template <class Functor>
  UpdateArgs<Functor> args(const typename Functor::Params& group) const {
    UpdateArgs<Functor> result;
    result.tensors = rows.table(config.param, config.grad, config.state, config.has_master);
    result.groups = &group;
    result.num_groups = 1;
    result.scalars = &scalars;
    result.write_back_grads = config.write_back;
    return result;
  }

  template <class Functor>
  void update(const typename Functor::Params& group) {
    fused_update_cpu(detect_cpu_isa(), args<Functor>(group), 0, rows.offsets.back());
  }

  bool operator==(const Problem& other) const {
    return params == other.params && grads == other.grads && masters == other.masters &&
           states == other.states;
  }

  Config config;
  std::vector<Buffer> params, grads, masters, states;
  std::unique_ptr<float> step;
  Rows rows;
  StepScalars scalars{0.5, 0.0f, 0.0f};
};

struct Expected {
  double param, state;
};

Expected reference(const SgdParams& group, double step, Expected in, double grad) {
  const double decay = group.weight_decay.value * in.param;
  const double momentum = group.momentum.value;
  double direction = (group.maximize ? -grad : grad) + (group.wd_after_momentum ? 0.0 : decay);
  if (momentum != 0.0) {
    in.state =
        step == 1.0 ? direction : momentum * in.state + (1.0 - group.dampening.value) * direction;
    direction = group.nesterov ? direction + momentum * in.state : in.state;
  }
  if (group.wd_after_momentum) direction += decay;
  in.param -= group.lr.value * direction;
  return in;
}

Expected reference(const AdagradParams& group, double step, Expected in, double grad) {
  const double decay = group.weight_decay.value * in.param;
  const double g = (group.maximize ? -grad : grad) + (group.adagrad_w_mode ? 0.0 : decay);
  in.state += g * g;
  const double direction =
      g / (std::sqrt(in.state) + group.eps.value) + (group.adagrad_w_mode ? decay : 0.0);
  in.param -= group.lr.value / (1.0 + (step - 1.0) * group.lr_decay.value) * direction;
  return in;
}

template <class Functor>
void expect_matches_reference(const Config& config, const typename Functor::Params& group,
                              float step, double tolerance) {
  const Problem before(config, {1003}, step);
  Problem after(config, {1003}, step);
  after.update<Functor>(group);
  for (std::int64_t i = 0; i < 1003; ++i) {
    const Buffer& start = config.has_master ? before.masters[0] : before.params[0];
    const Expected expected = reference(group, step, {start.get(i), before.states[0].get(i)},
                                        0.5 * before.grads[0].get(i));
    ASSERT_NEAR(after.params[0].get(i), expected.param, tolerance * (1 + std::abs(expected.param)));
    ASSERT_NEAR(after.states[0].get(i), expected.state, tolerance * (1 + std::abs(expected.state)));
  }
}

SgdParams sgd(int mode) {
  SgdParams group;
  group.lr.value = 0.05;
  group.momentum.value = (mode & 1) != 0 ? 0.9 : 0.0;
  group.dampening.value = 0.25;
  group.weight_decay.value = 0.1;
  group.nesterov = (mode & 2) != 0;
  group.wd_after_momentum = (mode & 4) != 0;
  group.maximize = (mode & 8) != 0;
  return group;
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

TEST(Sgd, MatchesTheFp64Formula) { expect_matches_fp64<Sgd>(sgd, 16); }
TEST(Adagrad, MatchesTheFp64Formula) { expect_matches_fp64<Adagrad>(adagrad, 8); }

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
    const std::int64_t total = whole.rows.offsets.back();
    fused_update_cpu(CpuIsa::kBaseline, whole.args<Functor>(group), 0, total);
    for (const CpuIsa isa : testing::levels_here()) {
      Problem split(config, sizes);
      for (std::int64_t begin = 0; begin < total; begin += 7919) {
        fused_update_cpu(isa, split.args<Functor>(group), begin, std::min(total, begin + 7919));
      }
      ASSERT_TRUE(split == whole) << name_of(isa);
    }
  }
}

TEST(Sgd, EveryLevelAndEverySplitGivesTheSameBits) {
  for (const int mode : {0, 1, 3, 5}) expect_same_bits_everywhere<Sgd>(sgd(mode));
}

TEST(Adagrad, EveryLevelAndEverySplitGivesTheSameBits) {
  for (const int mode : {1, 2}) expect_same_bits_everywhere<Adagrad>(adagrad(mode));
}

TEST(Sgd, WithoutMomentumTheBufferMayBeAbsentAndIsLeftAlone) {
  Problem absent({}, testing::interesting_sizes());
  for (TensorRow& row : absent.rows.rows) row.state[0] = nullptr;
  absent.update<Sgd>(sgd(0));
  const Problem before({}, testing::interesting_sizes());
  Problem present({}, testing::interesting_sizes());
  present.update<Sgd>(sgd(0));
  EXPECT_TRUE(present.params == absent.params);
  EXPECT_TRUE(present.states == before.states);
}

TEST(Sgd, AMomentumOnTheDeviceCountsAsUsedEvenWhileItIsZero) {
  float momentum = 0.0f;
  SgdParams by_pointer = sgd(0);
  by_pointer.momentum.value = -1.0;
  by_pointer.momentum.pointer = &momentum;
  EXPECT_TRUE(Sgd::uses_state(by_pointer, 0));
  EXPECT_FALSE(Sgd::uses_state(sgd(0), 0));
  Problem a({}, {100});
  Problem b({}, {100});
  a.update<Sgd>(by_pointer);
  b.update<Sgd>(sgd(0));
  EXPECT_TRUE(a == b) << "a momentum of 0 leaves the buffer as it is";
  momentum = 0.5f;
  SgdParams by_value = sgd(0);
  by_value.momentum.value = 0.5;
  a.update<Sgd>(by_pointer);
  b.update<Sgd>(by_value);
  EXPECT_TRUE(a == b);
}

TEST(Sgd, InfinitiesPropagateAsNumbersDo) {
  const double inf = std::numeric_limits<double>::infinity();
  for (const float step : {1.0f, 2.0f}) {
    Problem problem({}, {20}, step);
    problem.grads[0].set(17, inf);
    SgdParams group = sgd(1);
    problem.update<Sgd>(group);
    EXPECT_EQ(problem.states[0].get(17), inf);
    EXPECT_EQ(problem.params[0].get(17), -inf);
  }
}

}  // namespace
}  // namespace torchfuse::kernels
