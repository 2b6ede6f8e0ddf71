// SPDX-License-Identifier: BSD-3-Clause
// Averages of parameters, by themselves and through the update driver. test_optimizers.cpp compares
// levels, splits and alignments.
#include "kernels/common/ema.h"

#include <gtest/gtest.h>

#include "kernels/functors/sgd.h"
#include "optimizer_problem.h"

namespace torchfuse::kernels::testing {
namespace {

TEST(Ema, TheWeightIsThatOfTheDecay) {
  const EmaCoefs<double> coefs = ema_coefs<double>({0.75, 0.0, false}, 1.0);
  EXPECT_EQ(coefs.weight, 0.25);
  EXPECT_FALSE(coefs.copies);
  EXPECT_EQ(ema_coefs<float>({0.999, 0.0, false}, 1.0).weight, static_cast<float>(1.0 - 0.999));
}

TEST(Ema, WarmUpLimitsTheDecayOfTheNthStep) {
  const EmaParams params{0.9, 3.0, true};
  EXPECT_EQ(ema_coefs<double>(params, 4.0).weight, 1.0 - 2.0 / 11.0);
  EXPECT_EQ(ema_coefs<double>(params, 5.0).weight, 1.0 - 3.0 / 12.0);
  EXPECT_EQ(ema_coefs<double>(params, 83.0).weight, 1.0 - 0.9);  // 81 / 90
  EXPECT_EQ(ema_coefs<double>(params, 16777216.0).weight, 1.0 - 0.9);
}

TEST(Ema, UntilItsStartTheAverageIsACopy) {
  for (const float step : {1.0f, 2.0f, 3.0f}) {
    EXPECT_TRUE(ema_coefs<float>({0.9, 3.0, false}, step).copies) << step;
    EXPECT_FALSE(ema_coefs<float>({0.9, 0.0, false}, step).copies) << step;
  }
  EXPECT_FALSE(ema_coefs<float>({0.9, 3.0, false}, 4.0).copies);
  EXPECT_TRUE(ema_coefs<float>({0.0, 0.0, false}, 4.0).copies);
  // 1e8 + (1 - 1e8) is not 1 in fp32.
  EXPECT_EQ(moved_ema(1e8f, 1.0f, ema_coefs<float>({0.0, 0.0, false}, 4.0)), 1.0f);
}

/// Parameters in every storage: alone, with masters, with remainders, rounded at random.
std::vector<UpdateTuple> tuples() {
  constexpr DType kFp32 = DType::kFloat32, kFp64 = DType::kFloat64, kFp16 = DType::kFloat16,
                  kBf16 = DType::kBFloat16;
  std::vector<UpdateTuple> tuples{{kFp32, kFp32, kFp32},
                                  {kFp64, kFp64, kFp64},
                                  {kFp16, kFp16, kFp32},
                                  {kBf16, kBf16, kFp32},
                                  {kFp16, kFp16, kFp32, true},
                                  {kBf16, kBf16, kFp32, true},
                                  {kBf16, kBf16, kFp32, false, {}, true},
                                  {kBf16, kBf16, kFp32, false, {}, false, true}};
  for (UpdateTuple& tuple : tuples) tuple.has_ema = true;
  return tuples;
}

/// One tensor, whose remainders are zeros.
Operands<Buffer> operands_of(const UpdateTuple& tuple) {
  TensorList list = at_offset(contents_of<Sgd>(tuple, {1003}), 1);
  for (std::int64_t i = 0; i < 1003 && tuple.has_remainder; ++i) list[0].parts[kMaster].set(i, 0.0);
  return std::move(list[0]);
}

/// The fifth step of plain SGD.
Operands<Buffer> stepped(const UpdateTuple& tuple, Operands<Buffer> operands,
                         const EmaParams& averages, CpuIsa isa = detect_cpu_isa()) {
  SgdParams group;
  group.lr.value = 0.1;
  float step = 5.0f;
  TensorList list{std::move(operands)};
  OptimizerProblem<Sgd> problem(tuple, list, {group}, &step);
  problem.types.ema = averages;
  problem.run_on_cpu({1.0, 0.0f, 0.0f}, isa, 331);
  return std::move(list[0]);
}

TEST(Ema, TheDriverMovesItTowardsTheNewValue) {
  for (const UpdateTuple& tuple : tuples()) {
    for (const CpuIsa isa : levels_here()) {
      SCOPED_TRACE(tuple.name() + " at " + name_of(isa));
      const Operands<Buffer> before = operands_of(tuple);
      const Operands<Buffer> after = stepped(tuple, before, {0.9, 0.0, false}, isa);
      const Buffer& value = before.parts[tuple.has_master ? kMaster : kParam];
      const double tolerance = tuple.param == DType::kFloat64 ? 1e-15 : 1e-6;
      for (std::int64_t i = 0; i < value.numel(); ++i) {
        // Without rounding to 16 bits.
        const double updated = value.get(i) - 0.1 * before.parts[kGrad].get(i);
        const double expected = 0.9 * before.parts[kEma].get(i) + 0.1 * updated;
        ASSERT_NEAR(after.parts[kEma].get(i), expected, tolerance * (1.0 + std::abs(expected)))
            << i;
      }
    }
  }
}

TEST(Ema, ACopyHasTheBitsOfTheMaster) {
  for (const UpdateTuple& tuple : {tuples()[0], tuples()[1], tuples()[5]}) {
    const Operands<Buffer> after = stepped(tuple, operands_of(tuple), {0.9, 5.0, false});
    EXPECT_TRUE(after.parts[kEma] == after.parts[tuple.has_master ? kMaster : kParam])
        << tuple.name();
  }
}

TEST(Ema, TheParameterDoesNotDependOnIt) {
  for (const UpdateTuple& tuple : tuples()) {
    SCOPED_TRACE(tuple.name());
    UpdateTuple without = tuple;
    without.has_ema = false;
    const Operands<Buffer> before = operands_of(tuple);
    const Operands<Buffer> moved = stepped(tuple, before, {0.9, 0.0, false});
    const Operands<Buffer> alone = stepped(without, before, {0.9, 0.0, false});
    EXPECT_TRUE(moved.parts[kParam] == alone.parts[kParam]);
    EXPECT_TRUE(moved.parts[kMaster] == alone.parts[kMaster]);
    EXPECT_TRUE(alone.parts[kEma] == before.parts[kEma]);
    EXPECT_FALSE(moved.parts[kEma] == before.parts[kEma]);
  }
}

}  // namespace
}  // namespace torchfuse::kernels::testing
