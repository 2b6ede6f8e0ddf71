// SPDX-License-Identifier: BSD-3-Clause
// Optimizers that measure one norm of a tensor, NovoGrad and LARS, on the CPU: their three phases
// against fp64, and across levels, ranges, dtypes and alignments.
#pragma once

#include <gtest/gtest.h>

#include <cmath>

#include "one_norm_problem.h"
#include "recorded_results.h"

namespace torchfuse::kernels::testing {

/// One step on the CPU.
template <class Functor>
std::vector<OneNormOperands<Buffer>> one_norm_step(const LayerwiseTuple& tuple,
                                                   const std::vector<std::int64_t>& sizes,
                                                   const typename Functor::Params& group,
                                                   float step, CpuIsa isa = detect_cpu_isa(),
                                                   std::int64_t span = std::int64_t{1} << 40,
                                                   std::int64_t offset = 0, float skip = 0.0f) {
  std::vector<OneNormOperands<Buffer>> list = one_norm_contents(tuple, sizes, offset);
  OneNormProblem<Functor, Buffer> problem(tuple, list, &step, {group});
  problem.write_back = offset != 0;
  problem.run_on_cpu({0.5, 0.0f, skip}, isa, span);
  return list;
}

/// One tensor in fp64; the gradient is unscaled.
struct OneNormTensor {
  std::vector<double> param, grad, state;
  double tracked;
};

/// What a step makes of a tensor.
template <class Functor>
using OneNormFormula = void (*)(const typename Functor::Params& group, double step,
                                OneNormTensor& tensor);

inline double norm_of(const std::vector<double>& values) {
  double sum = 0.0;
  for (const double value : values) sum += value * value;
  return std::sqrt(sum);
}

template <class Functor>
void expect_one_norm_near(const LayerwiseTuple& tuple, const typename Functor::Params& group,
                          float step, OneNormFormula<Functor> formula, double tolerance) {
  for (const std::int64_t numel : {std::int64_t{1003}, 2 * kNormChunk + 77}) {
    const OneNormOperands<Buffer> before = one_norm_contents(tuple, {numel})[0];
    const OneNormOperands<Buffer> after = one_norm_step<Functor>(tuple, {numel}, group, step)[0];
    const Buffer& start = tuple.has_master ? before.master : before.param;
    OneNormTensor exact;
    for (std::int64_t i = 0; i < numel; ++i) {
      exact.param.push_back(start.get(i));
      exact.grad.push_back(0.5 * before.grad.get(i));
      exact.state.push_back(before.state.get(i));
    }
    exact.tracked = before.tracked.get(0);
    formula(group, step, exact);
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
void expect_one_norm_matches_fp64(Group group_of, int modes, OneNormFormula<Functor> formula) {
  const DType f32 = DType::kFloat32;
  const DType wide = DType::kFloat64;
  for (int mode = 0; mode < modes; ++mode) {
    SCOPED_TRACE(mode);
    for (const float step : {1.0f, 2.0f, 70.0f}) {
      expect_one_norm_near<Functor>({f32, f32, f32, false}, group_of(mode), step, formula, 1e-6);
      expect_one_norm_near<Functor>({wide, wide, wide, false}, group_of(mode), step, formula,
                                    1e-14);
    }
  }
  for (const LayerwiseTuple& tuple : layerwise_tuples()) {
    if (tuple.param == wide) continue;
    const bool bf16 = tuple.param == DType::kBFloat16 || tuple.state == DType::kBFloat16;
    const double tolerance = tuple.param == f32 ? 1e-6 : bf16 ? 5e-3 : 6e-4;
    expect_one_norm_near<Functor>(tuple, group_of(1), 2.0f, formula, tolerance);
  }
}

template <class Functor>
void expect_one_norm_same_bits(const typename Functor::Params& group) {
  const auto sizes = interesting_sizes();
  for (const LayerwiseTuple& tuple : layerwise_tuples()) {
    for (const std::int64_t offset : {0, 1}) {
      const auto whole = one_norm_step<Functor>(tuple, sizes, group, 3.0f, CpuIsa::kBaseline,
                                                std::int64_t{1} << 40, offset);
      for (const auto& tensor : whole) {
        record(tensor.param, tensor.grad, tensor.state, tensor.master, tensor.tracked);
      }
      for (const CpuIsa isa : levels_here()) {
        ASSERT_TRUE(one_norm_step<Functor>(tuple, sizes, group, 3.0f, isa, 7919, offset) == whole)
            << name_of(isa);
      }
    }
  }
}

template <class Functor>
void expect_one_norm_skipped(const typename Functor::Params& group) {
  const LayerwiseTuple tuple = layerwise_tuples()[0];
  const auto after = one_norm_step<Functor>(tuple, interesting_sizes(), group, 1.0f,
                                            detect_cpu_isa(), std::int64_t{1} << 40, 0, 1.0f);
  EXPECT_TRUE(after == one_norm_contents(tuple, interesting_sizes()));
}

}  // namespace torchfuse::kernels::testing
