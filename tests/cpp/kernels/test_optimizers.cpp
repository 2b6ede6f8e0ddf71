// SPDX-License-Identifier: BSD-3-Clause
// A step of every optimizer on the CPU: against fp64 in every mode and storage, and with the same
// bits at every instruction level, wherever ranges are split and tensors lie.
#include <gtest/gtest.h>

#include "optimizer_cases.h"
#include "optimizer_problem.h"
#include "recorded_results.h"

namespace torchfuse::kernels::testing {
namespace {

constexpr DType kFp32 = DType::kFloat32, kFp16 = DType::kFloat16, kBf16 = DType::kBFloat16;
constexpr StepScalars kHalf{0.5, 0.0f, 0.0f};

template <class Functor>
class Optimizer : public ::testing::Test {
 protected:
  using Case = OptimizerCase<Functor>;
  using Params = typename Functor::Params;

  static TensorList stepped(const UpdateTuple& tuple, TensorList list,
                            const std::vector<Params>& groups, float step,
                            const StepScalars& scalars = kHalf, CpuIsa isa = detect_cpu_isa(),
                            std::int64_t span = kWhole) {
    OptimizerProblem<Functor> problem(tuple, list, groups, &step);
    problem.write_back = true;
    problem.run_on_cpu(scalars, isa, span);
    return list;
  }

  static void expect_formula(const UpdateTuple& tuple, int mode, float step, double tolerance) {
    SCOPED_TRACE(tuple.name() + ", mode " + std::to_string(mode));
    const Params group = Case::group(mode);
    std::vector<std::int64_t> sizes{1003};
    if (Layerwise<Functor>) sizes.push_back(2 * kNormChunk + 77);
    const TensorList before = contents_of<Functor>(tuple, sizes);
    const TensorList after = stepped(tuple, before, {group}, step);
    for (std::size_t t = 0; t < sizes.size(); ++t) {
      ExactTensor exact = exact_of(tuple, before[t]);
      Case::step(group, static_cast<double>(step), exact);
      expect_near(tuple, group, before[t], after[t], exact, tolerance);
    }
  }

 private:
  static ExactTensor exact_of(const UpdateTuple& tuple, const Operands<Buffer>& operands) {
    ExactTensor exact;
    const Buffer& start = operands.parts[tuple.has_master ? kMaster : kParam];
    for (std::int64_t i = 0; i < start.numel(); ++i) {
      exact.param.push_back(start.get(i));
      exact.grad.push_back(0.5 * operands.parts[kGrad].get(i));
      for (int k = 0; k < kMaxStates; ++k) {
        exact.state[k].push_back(operands.parts[static_cast<std::size_t>(kFirst + k)].get(i));
      }
    }
    exact.tracked = operands.tracked.get(0);
    return exact;
  }

  static void expect_near(const UpdateTuple& tuple, const Params& group,
                          const Operands<Buffer>& before, const Operands<Buffer>& after,
                          const ExactTensor& exact, double tolerance) {
    const bool wide = tuple.param == DType::kFloat64;
    // LAMB changes a parameter by about its own size, and by a quotient of sums.
    const double of_change = !std::is_same_v<Functor, Lamb> ? 1.0 : wide ? 100.0 : 10.0;
    Buffer scaled(tuple.grad, 1);
    for (std::size_t i = 0; i < exact.param.size(); ++i) {
      const auto at = static_cast<std::int64_t>(i);
      const double p = exact.param[i];
      ASSERT_NEAR(after.parts[kParam].get(at), p, of_change * tolerance * (1 + std::abs(p))) << i;
      for (int k = 0; k < Functor::kNumStates; ++k) {
        const auto part = static_cast<std::size_t>(kFirst + k);
        const double s = exact.state[k][i];
        if (Functor::uses_state(group, k)) {
          ASSERT_NEAR(after.parts[part].get(at), s, tolerance * (1 + std::abs(s))) << i;
        }
      }
      scaled.set(0, (kReadsGrad<Functor> ? 0.5 : 1.0) * before.parts[kGrad].get(at));
      ASSERT_EQ(after.parts[kGrad].get(at), scaled.get(0)) << i;
    }
    ASSERT_NEAR(after.tracked.get(0), exact.tracked, (wide ? 1e-14 : 1e-6) * exact.tracked);
  }
};
TYPED_TEST_SUITE(Optimizer, Optimizers, OptimizerName);

TYPED_TEST(Optimizer, MatchesTheFp64FormulaInEveryMode) {
  const DType wide = DType::kFloat64;
  for (int mode = 0; mode < OptimizerCase<TypeParam>::kModes; ++mode) {
    for (const float step : {1.0f, 2.0f, 70.0f}) {
      TestFixture::expect_formula({}, mode, step, 1e-6);
      TestFixture::expect_formula({wide, wide, wide}, mode, step, 1e-14);
    }
  }
}

TYPED_TEST(Optimizer, MatchesTheFp64FormulaInEveryStorage) {
  for (const auto& tuples : {own_tuples(), mixed_tuples()}) {
    for (const UpdateTuple& tuple : tuples) {
      if (tuple.param == DType::kFloat64 || tuple.has_remainder || tuple.stochastic) continue;
      double tolerance = 1e-6;
      for (const Part part : {kParam, kFirst, kSecond}) {
        if (tuple.dtype(part) == kFp16) tolerance = std::max(tolerance, 6e-4);
        if (tuple.dtype(part) == kBf16) tolerance = 5e-3;
      }
      for (const int mode : OptimizerCase<TypeParam>::some_modes()) {
        TestFixture::expect_formula(tuple, mode, 2.0f, tolerance);
      }
    }
  }
}

/// Besides those that are tested on CUDA, the driver's combinations of storage types, once.
template <class Functor>
std::vector<UpdateTuple> tuples_for() {
  std::vector<UpdateTuple> tuples = update_tuples();
  if (!std::is_same_v<Functor, Adam>) return tuples;
  for (const DType param : {kFp32, kFp16, kBf16}) {
    for (const DType grad : {kFp32, kFp16, kBf16}) {
      for (const DType square : {kFp32, kFp16, kBf16}) {
        tuples.push_back({param, grad, kBf16, false, square});
        tuples.push_back({param, grad, kFp16, param != kFp32, square});
      }
    }
  }
  return tuples;
}

TYPED_TEST(Optimizer, EveryLevelSplitAndAlignmentGivesTheSameBits) {
  const std::vector<typename TypeParam::Params> groups = some_groups<TypeParam>();
  for (const UpdateTuple& tuple : tuples_for<TypeParam>()) {
    const TensorList before = contents_of<TypeParam>(tuple, interesting_sizes());
    const TensorList moved = at_offset(before, 1);
    const TensorList expected =
        TestFixture::stepped(tuple, before, groups, 3.0f, kHalf, CpuIsa::kBaseline);
    for (const Operands<Buffer>& tensor : expected) record(tensor.parts, tensor.tracked);
    for (const CpuIsa isa : levels_here()) {
      SCOPED_TRACE(tuple.name() + " at " + name_of(isa));
      expect_same_bits(TestFixture::stepped(tuple, before, groups, 3.0f, kHalf, isa), expected);
      expect_same_bits(TestFixture::stepped(tuple, moved, groups, 3.0f, kHalf, isa, 7919),
                       expected);
      ASSERT_FALSE(::testing::Test::HasFatalFailure());
    }
  }
}

TYPED_TEST(Optimizer, ASkippedStepChangesNothing) {
  for (const UpdateTuple& tuple : update_tuples()) {
    for (const float skip : {1.0f, 2.0f}) {
      SCOPED_TRACE(tuple.name());
      const TensorList before = contents_of<TypeParam>(tuple, {5, 1003});
      expect_same_bits(
          TestFixture::stepped(tuple, before, some_groups<TypeParam>(), 1.0f, {0.5, 0.0f, skip}),
          before);
    }
  }
}

template <class Functor>
class LayerwiseOptimizer : public ::testing::Test {};
TYPED_TEST_SUITE(LayerwiseOptimizer, LayerwiseOptimizers, OptimizerName);

// As for tensors that are split over processes: the phase stops at the sums, and goes on from them.
TYPED_TEST(LayerwiseOptimizer, SumsAreThePartialsOfASecondNormsPhase) {
  std::vector<std::vector<double>> norms;
  for (const bool in_two : {false, true}) {
    float step = 7.0f;
    TensorList list = contents_of<TypeParam>({}, {5, 0, 2 * kNormChunk + 77, 900});
    OptimizerProblem<TypeParam> problem({}, list, some_groups<TypeParam>(), &step);
    std::vector<MeasurePartial> sums(problem.norms.size());
    auto args = problem.measure(&kHalf, problem.partials.data(), problem.norms.data());
    if (in_two) args.sums = sums.data();
    fused_measure_cpu<TypeParam>(detect_cpu_isa(), args, 0, problem.rows.offsets.back());
    tensor_norms<TypeParam>(args, 0, 4);
    if (in_two) {
      EXPECT_EQ(problem.norms, std::vector<double>(problem.norms.size())) << "norms of a part";
      const std::vector<std::int64_t> one_each{0, 1, 2, 3, 4};
      args.chunk_offsets = one_each.data();
      args.partials = sums.data();
      args.sums = nullptr;
      tensor_norms<TypeParam>(args, 0, 4);
    }
    norms.push_back(problem.norms);
  }
  EXPECT_EQ(norms[1], norms[0]);
  EXPECT_GT(norms[0][0], 0.0);
}

TYPED_TEST(LayerwiseOptimizer, ASkippedStepMeasuresNothing) {
  float step = 1.0f;
  TensorList list = contents_of<TypeParam>({}, {5, 1003});
  OptimizerProblem<TypeParam> problem({}, list, some_groups<TypeParam>(), &step);
  problem.run_on_cpu({0.5, 0.0f, 1.0f});
  EXPECT_EQ(problem.norms, std::vector<double>(problem.norms.size()));
}

TEST(Lamb, LargeParametersDoNotOverflowTheSum) {
  float step = 1.0f;
  TensorList list = contents_of<Lamb>({}, {200});
  for (std::int64_t i = 0; i < 200; ++i) list[0].parts[kParam].set(i, i == 150 ? -3e30 : 1.0);
  OptimizerProblem<Lamb> problem({}, list, {OptimizerCase<Lamb>::group(0)}, &step);
  problem.run_on_cpu(kHalf);
  const double expected = static_cast<double>(3e30f);
  EXPECT_NEAR(problem.norms[0], expected, 1e-6 * expected);
  EXPECT_EQ(problem.partials[0].largest, expected);
}

TEST(Lion, WithoutADirectionOnlyTheDecayMoves) {
  float step = 1.0f;
  TensorList list = contents_of<Lion>({}, {1});
  for (const Part part : {kGrad, kFirst}) list[0].parts[part].set(0, 0.0);
  list[0].parts[kParam].set(0, 2.0);
  OptimizerProblem<Lion>({}, list, {OptimizerCase<Lion>::group(1)}, &step).run_on_cpu(kHalf);
  const auto moved = static_cast<float>(list[0].parts[kParam].get(0));
  EXPECT_FLOAT_EQ(moved, 2.0f - 0.05f * 0.1f * 2.0f);
}

// The direction takes the place of a parameter, in memory that nothing has written.
TEST(MuonMomentum, WritesADirectionWhateverWasThere) {
  for (const DType direction : {kFp32, kFp16, kBf16}) {
    const UpdateTuple tuple{direction, kBf16, kFp32};
    float step = 1.0f;
    TensorList expected = contents_of<MuonMomentum>(tuple, {1003});
    TensorList list = expected;
    for (std::int64_t i = 0; i < 1003; ++i) list[0].parts[kParam].set(i, NAN);
    const auto groups = some_groups<MuonMomentum>();
    OptimizerProblem<MuonMomentum>(tuple, expected, groups, &step).run_on_cpu(kHalf);
    OptimizerProblem<MuonMomentum>(tuple, list, groups, &step).run_on_cpu(kHalf);
    expect_same_bits(list, expected);
  }
}

TEST(MuonUpdate, ReadsNoGradientAndWritesParametersAlone) {
  const auto groups = some_groups<MuonUpdate>();
  for (const UpdateTuple& tuple : {UpdateTuple{}, UpdateTuple{kBf16, kBf16, kFp16}}) {
    float step = 1.0f;
    TensorList expected = contents_of<MuonUpdate>(tuple, {1003});
    TensorList before = expected;
    for (std::int64_t i = 0; i < 1003; ++i) before[0].parts[kGrad].set(i, NAN);
    TensorList after = before;
    OptimizerProblem<MuonUpdate>(tuple, expected, groups, &step).run_on_cpu(kHalf);
    OptimizerProblem<MuonUpdate> problem(tuple, after, groups, &step);
    problem.write_back = true;
    problem.run_on_cpu(kHalf);
    EXPECT_TRUE(same_bits(after[0].parts[kParam], expected[0].parts[kParam]));
    before[0].parts[kParam] = after[0].parts[kParam];
    expect_same_bits(after, before);
  }
}

TEST(NovoGrad, TheNormOfVeryLargeAndVerySmallNumbersIsExact) {
  const NovoGradParams group = OptimizerCase<NovoGrad>::group(0);
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
