// SPDX-License-Identifier: BSD-3-Clause
// The measure and norms phases on the CPU: against plain loops, at every instruction level,
// wherever ranges are split.
#include <gtest/gtest.h>

#include "layerwise_problem.h"
#include "recorded_results.h"

namespace torchfuse::kernels::testing {
namespace {

using HostOperands = LambOperands<Buffer>;

struct Result {
  std::vector<HostOperands> list;
  std::vector<double> norms;
};

/// Both phases at one level, the elements split into ranges of `step`.
Result measure(CpuIsa isa, const LayerwiseTuple& tuple, const std::vector<std::int64_t>& sizes,
               std::int64_t step, const StepScalars& scalars, std::int64_t offset = 0,
               bool write_back = false) {
  std::vector<float> steps{1.0f, 7.0f};
  Result result{lamb_contents(tuple, sizes, offset), {}};
  LambProblem<Buffer> problem(tuple, result.list, steps.data(), lamb_groups());
  problem.write_back = write_back;
  const MeasureArgs<Lamb> args = problem.args(&scalars);
  const std::int64_t total = problem.rows.offsets.back();
  for (std::int64_t begin = 0; begin < total; begin += step) {
    fused_measure_cpu(isa, args, begin, std::min(begin + step, total));
  }
  tensor_norms(args, 0, static_cast<std::int64_t>(sizes.size()));
  result.norms = problem.norms;
  return result;
}

constexpr std::int64_t kWhole = std::int64_t{1} << 40;

TEST(Measure, GivesTheNormsOfTheFormula) {
  const StepScalars scalars{0.5, 0.0f, 0.0f};
  const std::vector<std::int64_t> sizes = interesting_sizes();
  const std::vector<LambParams> groups = lamb_groups();
  const float steps[] = {1.0f, 7.0f};
  const LayerwiseTuple tuple{DType::kFloat64, DType::kFloat64, DType::kFloat64, false};
  const std::vector<HostOperands> before = lamb_contents(tuple, sizes);
  const Result result = measure(detect_cpu_isa(), tuple, sizes, kWhole, scalars);
  for (std::size_t t = 0; t < sizes.size(); ++t) {
    SCOPED_TRACE("tensor " + std::to_string(t));
    const LambParams& group = groups[t % groups.size()];
    const double decay = group.weight_decay.value;
    double param_sum = 0.0;
    double update_sum = 0.0;
    for (std::int64_t i = 0; i < sizes[t]; ++i) {
      const double p = before[t].param.get(i);
      double g = before[t].grad.get(i) * 0.5 * (group.maximize ? -1.0 : 1.0);
      if (!group.adam_w_mode) g += decay * p;
      const double m = 0.9 * before[t].exp_avg.get(i) + (group.grad_averaging ? 0.1 : 1.0) * g;
      const double v = 0.99 * before[t].exp_avg_sq.get(i) + 0.01 * g * g;
      const double step = static_cast<double>(steps[t % 2]);
      const double root = std::sqrt(v / (1.0 - std::pow(0.99, step))) + group.eps.value;
      const double u =
          m / (1.0 - std::pow(0.9, step)) / root + (group.adam_w_mode ? decay * p : 0.0);
      param_sum += p * p;
      update_sum += u * u;
      EXPECT_NEAR(result.list[t].exp_avg.get(i), m, 1e-14);
      EXPECT_NEAR(result.list[t].exp_avg_sq.get(i), v, 1e-14);
    }
    EXPECT_NEAR(result.norms[2 * t], std::sqrt(param_sum), 1e-12 * std::sqrt(param_sum));
    EXPECT_NEAR(result.norms[2 * t + 1], std::sqrt(update_sum), 1e-12 * std::sqrt(update_sum));
    EXPECT_TRUE(result.list[t].param == before[t].param);
    EXPECT_TRUE(result.list[t].grad == before[t].grad);
  }
}

TEST(Measure, GivesTheSameBitsAtEveryLevelForEverySplitAndAlignment) {
  const StepScalars scalars{0.5, 0.0f, 0.0f};
  const std::vector<std::int64_t> sizes{1, 0, 63, 64, 65, 1003, 16384, 16385, 40001};
  for (const LayerwiseTuple& tuple : layerwise_tuples()) {
    const Result expected = measure(CpuIsa::kBaseline, tuple, sizes, kWhole, scalars);
    record(expected.norms);
    for (const CpuIsa isa : levels_here()) {
      for (const std::int64_t step : {kWhole, std::int64_t{1000}, std::int64_t{16384}}) {
        const Result result = measure(isa, tuple, sizes, step, scalars, step == 1000 ? 3 : 0);
        SCOPED_TRACE(std::string(name_of(isa)) + ", ranges of " + std::to_string(step));
        for (std::size_t i = 0; i < expected.norms.size(); ++i) {
          ASSERT_EQ(result.norms[i], expected.norms[i]) << "norm " << i;
        }
        for (std::size_t t = 0; t < sizes.size(); ++t) {
          for (std::int64_t i = 0; i < sizes[t]; ++i) {
            ASSERT_EQ(result.list[t].exp_avg.get(i), expected.list[t].exp_avg.get(i));
            ASSERT_EQ(result.list[t].exp_avg_sq.get(i), expected.list[t].exp_avg_sq.get(i));
          }
        }
      }
    }
  }
}

/// All phases; the tensors' parameters, states and masters.
std::vector<Buffer> step(CpuIsa isa, const LayerwiseTuple& tuple,
                         const std::vector<std::int64_t>& sizes, std::int64_t range) {
  const StepScalars scalars{0.5, 0.0f, 0.0f};
  std::vector<float> steps{1.0f, 7.0f};
  std::vector<HostOperands> list = lamb_contents(tuple, sizes);
  LambProblem<Buffer> problem(tuple, list, steps.data(), lamb_groups());
  const MeasureArgs<Lamb> args = problem.args(&scalars);
  const std::int64_t total = problem.rows.offsets.back();
  fused_measure_cpu(isa, args, 0, total);
  tensor_norms(args, 0, static_cast<std::int64_t>(sizes.size()));
  for (std::int64_t begin = 0; begin < total; begin += range) {
    fused_update_cpu(isa, args.update, begin, std::min(begin + range, total));
  }
  std::vector<Buffer> results;
  for (const HostOperands& t : list) {
    for (const Buffer* b : {&t.param, &t.exp_avg, &t.exp_avg_sq, &t.master}) results.push_back(*b);
  }
  return results;
}

TEST(Lamb, AStepGivesTheSameBitsAtEveryLevelForEverySplit) {
  const std::vector<std::int64_t> sizes{1, 0, 63, 65, 1003, 16385};
  for (const auto& tuples : {layerwise_tuples(), mixed_layerwise_tuples()}) {
    for (const LayerwiseTuple& tuple : tuples) {
      const std::vector<Buffer> expected = step(CpuIsa::kBaseline, tuple, sizes, kWhole);
      record(expected);
      for (const CpuIsa isa : levels_here()) {
        EXPECT_TRUE(step(isa, tuple, sizes, 1000) == expected) << name_of(isa);
      }
    }
  }
}

TEST(Measure, StoresScaledGradientsOnRequest) {
  const StepScalars scalars{0.25, 0.0f, 0.0f};
  const LayerwiseTuple tuple{DType::kFloat32, DType::kFloat32, DType::kFloat32, false};
  const std::vector<std::int64_t> sizes{5, 64, 1003};
  const std::vector<HostOperands> before = lamb_contents(tuple, sizes);
  const Result result = measure(detect_cpu_isa(), tuple, sizes, kWhole, scalars, 0, true);
  for (std::size_t t = 0; t < sizes.size(); ++t) {
    for (std::int64_t i = 0; i < sizes[t]; ++i) {
      ASSERT_EQ(result.list[t].grad.get(i), 0.25 * before[t].grad.get(i));
    }
  }
}

TEST(Measure, ASkippedStepTouchesNothing) {
  const StepScalars scalars{0.5, 0.0f, 1.0f};
  const LayerwiseTuple tuple{DType::kFloat32, DType::kFloat32, DType::kFloat32, false};
  const std::vector<std::int64_t> sizes{5, 1003};
  const std::vector<HostOperands> before = lamb_contents(tuple, sizes);
  const Result result = measure(detect_cpu_isa(), tuple, sizes, kWhole, scalars);
  for (std::size_t t = 0; t < sizes.size(); ++t) {
    EXPECT_TRUE(result.list[t].exp_avg == before[t].exp_avg);
    EXPECT_TRUE(result.list[t].exp_avg_sq == before[t].exp_avg_sq);
  }
  EXPECT_EQ(result.norms, std::vector<double>(4, 0.0));
}

std::vector<MeasurePartial> sums_of(LambProblem<Buffer>& problem, const StepScalars& scalars) {
  std::vector<MeasurePartial> sums(problem.norms.size());
  MeasureArgs<Lamb> args = problem.args(&scalars);
  args.sums = sums.data();
  fused_measure_cpu(detect_cpu_isa(), args, 0, problem.rows.offsets.back());
  tensor_norms(args, 0, static_cast<std::int64_t>(problem.rows.rows.size()));
  return sums;
}

TEST(TensorNorms, SumsOfPartsGiveTheNormsOfTheWhole) {
  const StepScalars scalars{0.5, 0.0f, 0.0f};
  const LayerwiseTuple tuple{DType::kFloat32, DType::kFloat32, DType::kFloat32, false};
  std::vector<float> steps{1.0f, 7.0f};
  std::vector<HostOperands> list = lamb_contents(tuple, {20000, 0, 900});
  LambProblem<Buffer> whole(tuple, list, steps.data(), lamb_groups());
  LambProblem<Buffer> again(tuple, list, steps.data(), lamb_groups());
  const std::vector<HostOperands> before = list;
  const MeasureArgs<Lamb> measured = whole.args(&scalars);
  fused_measure_cpu(detect_cpu_isa(), measured, 0, whole.rows.offsets.back());
  tensor_norms(measured, 0, 3);

  // The second time as two halves of each tensor, whose sums come together.
  list = before;
  LambProblem<Buffer> first = again;
  LambProblem<Buffer> second = again;
  std::vector<MeasurePartial> sums(whole.norms.size());
  for (LambProblem<Buffer>* part : {&first, &second}) {
    Rows rows;
    part->chunk_offsets = {0};
    for (std::size_t t = 0; t < list.size(); ++t) {
      TensorRow row = part->rows.rows[t];
      const std::int64_t half = row.numel / 2;
      if (part == &second) {
        const auto move = [&](void* operand) { return static_cast<float*>(operand) + half; };
        row.param = move(row.param);
        row.grad = move(row.grad);
        for (int k = 0; k < 2; ++k) row.state[k] = move(row.state[k]);
      }
      row.numel = part == &first ? half : row.numel - half;
      rows.add(row);
      part->chunk_offsets.push_back(part->chunk_offsets.back() + num_norm_chunks(row.numel));
    }
    part->rows = rows;
    const std::vector<MeasurePartial> parts = sums_of(*part, scalars);
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] = sums[i] + parts[i];
  }
  const std::vector<std::int64_t> one_each{0, 1, 2, 3};
  MeasureArgs<Lamb> args = first.args(&scalars);
  args.partials = sums.data();
  args.chunk_offsets = one_each.data();
  tensor_norms(args, 0, 3);
  for (std::size_t i = 0; i < whole.norms.size(); ++i) {
    EXPECT_NEAR(first.norms[i], whole.norms[i], 1e-6 * whole.norms[i]) << "norm " << i;
  }
  EXPECT_GT(whole.norms[0], 0.0);
  EXPECT_EQ(first.norms[2], 0.0);
}

TEST(Measure, LargeParametersDoNotOverflowTheSum) {
  const StepScalars scalars{1.0, 0.0f, 0.0f};
  const LayerwiseTuple tuple{DType::kFloat32, DType::kFloat32, DType::kFloat32, false};
  std::vector<float> steps{1.0f, 1.0f};
  std::vector<HostOperands> list = lamb_contents(tuple, {200});
  for (std::int64_t i = 0; i < 200; ++i) list[0].param.set(i, i == 150 ? -3e30 : 1.0);
  LambProblem<Buffer> problem(tuple, list, steps.data(), {lamb_groups()[1]});
  const MeasureArgs<Lamb> args = problem.args(&scalars);
  fused_measure_cpu(detect_cpu_isa(), args, 0, 200);
  tensor_norms(args, 0, 1);
  const double expected = static_cast<double>(3e30f);
  EXPECT_NEAR(problem.norms[0], expected, 1e-6 * expected);
  EXPECT_EQ(problem.partials[0].largest, expected);
}

}  // namespace
}  // namespace torchfuse::kernels::testing
