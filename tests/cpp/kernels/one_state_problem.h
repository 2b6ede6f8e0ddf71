// SPDX-License-Identifier: BSD-3-Clause
// The update driver with functors of one state: a list of tensors, and checks against fp64 and
// across levels, ranges, dtypes and alignments.
#pragma once

#include <gtest/gtest.h>

#include <memory>

#include "kernel_test.h"
#include "kernels/fused_optimizer.h"
#include "recorded_results.h"

namespace torchfuse::kernels::testing {

struct OneStateConfig {
  DType param = DType::kFloat32;
  DType grad = DType::kFloat32;
  DType state = DType::kFloat32;
  bool has_master = false;
  bool write_back = false;
  std::int64_t offset = 0;
};

/// Tensors of several sizes with the same random content, all in their `step`-th step.
struct OneStateProblem {
  OneStateProblem(const OneStateConfig& config, const std::vector<std::int64_t>& sizes,
                  float step = 3.0f)
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

  bool operator==(const OneStateProblem& other) const {
    return params == other.params && grads == other.grads && masters == other.masters &&
           states == other.states;
  }

  OneStateConfig config;
  std::vector<Buffer> params, grads, masters, states;
  std::unique_ptr<float> step;
  Rows rows;
  StepScalars scalars{0.5, 0.0f, 0.0f};
};

/// One element in fp64.
struct OneStateElement {
  double param, state;
};

/// What a step makes of an element; the gradient is unscaled.
template <class Functor>
using OneStateFormula = OneStateElement (*)(const typename Functor::Params& group, double step,
                                            OneStateElement in, double grad);

template <class Functor>
void expect_one_state_near(const OneStateConfig& config, const typename Functor::Params& group,
                           float step, OneStateFormula<Functor> formula, double tolerance) {
  const OneStateProblem before(config, {1003}, step);
  OneStateProblem after(config, {1003}, step);
  after.update<Functor>(group);
  for (std::int64_t i = 0; i < 1003; ++i) {
    const Buffer& start = config.has_master ? before.masters[0] : before.params[0];
    const OneStateElement expected =
        formula(group, step, {start.get(i), before.states[0].get(i)}, 0.5 * before.grads[0].get(i));
    ASSERT_NEAR(after.params[0].get(i), expected.param, tolerance * (1 + std::abs(expected.param)));
    ASSERT_NEAR(after.states[0].get(i), expected.state, tolerance * (1 + std::abs(expected.state)));
  }
}

/// In every mode in fp32 and fp64, in the first step and later; in every storage.
template <class Functor, class Group>
void expect_one_state_matches_fp64(Group group_of, int modes, OneStateFormula<Functor> formula) {
  const DType wide = DType::kFloat64;
  for (int mode = 0; mode < modes; ++mode) {
    SCOPED_TRACE(mode);
    for (const float step : {1.0f, 2.0f, 70.0f}) {
      expect_one_state_near<Functor>({}, group_of(mode), step, formula, 1e-6);
      expect_one_state_near<Functor>({wide, wide, wide}, group_of(mode), step, formula, 1e-14);
    }
  }
  const DType f32 = DType::kFloat32;
  for (const DType narrow : {DType::kFloat16, DType::kBFloat16}) {
    const double tolerance = narrow == DType::kFloat16 ? 6e-4 : 5e-3;
    expect_one_state_near<Functor>({narrow, narrow, f32}, group_of(1), 2.0f, formula, tolerance);
    expect_one_state_near<Functor>({narrow, narrow, narrow}, group_of(1), 2.0f, formula, tolerance);
    expect_one_state_near<Functor>({narrow, f32, f32, true}, group_of(1), 2.0f, formula, tolerance);
    expect_one_state_near<Functor>({f32, narrow, f32}, group_of(1), 2.0f, formula, 1e-6);
  }
}

template <class Functor>
void expect_one_state_same_bits(const typename Functor::Params& group) {
  const DType f32 = DType::kFloat32;
  const DType f64 = DType::kFloat64;
  std::vector<OneStateConfig> configs{{f64, f64, f64, false, true, 1}};
  for (const DType param : {f32, DType::kFloat16, DType::kBFloat16}) {
    for (const DType grad : {f32, param}) {
      configs.push_back({param, grad, f32, false, true, 1});
      configs.push_back({param, grad, param, false, false, 1});
      if (param != f32) configs.push_back({param, grad, f32, true, false, 0});
    }
  }
  for (const OneStateConfig& config : configs) {
    const auto sizes = interesting_sizes();
    OneStateProblem whole(config, sizes);
    const std::int64_t total = whole.rows.offsets.back();
    fused_update_cpu(CpuIsa::kBaseline, whole.args<Functor>(group), 0, total);
    record(whole.params, whole.grads, whole.masters, whole.states);
    for (const CpuIsa isa : levels_here()) {
      OneStateProblem split(config, sizes);
      for (std::int64_t begin = 0; begin < total; begin += 7919) {
        fused_update_cpu(isa, split.args<Functor>(group), begin, std::min(total, begin + 7919));
      }
      ASSERT_TRUE(split == whole) << name_of(isa);
    }
  }
}

}  // namespace torchfuse::kernels::testing
