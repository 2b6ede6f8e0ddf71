// SPDX-License-Identifier: BSD-3-Clause
// Averages of parameters, by themselves and through the update driver: against fp64, and the same
// bits at every instruction level and however the elements are split.
#include "kernels/common/ema.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "kernel_test.h"
#include "kernels/functors/sgd.h"
#include "kernels/fused_optimizer.h"
#include "recorded_results.h"

namespace torchfuse::kernels {
namespace {

using testing::Buffer;

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

struct Storage {
  const char* name;
  DType param;
  bool has_master = false;
  bool has_remainder = false;
  bool stochastic = false;

  bool wide() const { return param == DType::kFloat64; }
  DType full() const { return wide() ? DType::kFloat64 : DType::kFloat32; }
};

constexpr Storage kStorages[] = {{"fp32", DType::kFloat32},
                                 {"fp64", DType::kFloat64},
                                 {"fp16", DType::kFloat16},
                                 {"bf16", DType::kBFloat16},
                                 {"fp16 with masters", DType::kFloat16, true},
                                 {"bf16 with masters", DType::kBFloat16, true},
                                 {"bf16 with remainders", DType::kBFloat16, false, true},
                                 {"stochastic bf16", DType::kBFloat16, false, false, true}};

/// One tensor and a step of plain SGD.
struct Problem {
  Problem(const Storage& storage, std::int64_t numel, std::int64_t offset)
      : storage(storage),
        numel(numel),
        param(storage.param, numel, offset),
        grad(storage.param, numel, offset),
        master(storage.has_remainder ? DType::kBFloat16 : DType::kFloat32, numel, offset),
        ema(storage.full(), numel, offset) {
    std::mt19937 random(5);
    for (Buffer* buffer : {&param, &grad, &ema}) buffer->fill_normal(random);
    if (storage.has_remainder) return;  // any 16 bits are one, and zeros are there
    for (std::int64_t i = 0; i < numel; ++i) master.set(i, param.get(i) * (1.0 + 1e-4));
  }

  UpdateArgs<Sgd> args(bool with_ema) {
    row = {};
    row.param = param.data();
    row.grad = grad.data();
    row.master = storage.has_master || storage.has_remainder ? master.data() : nullptr;
    row.ema = ema.data();
    row.step = &step;
    row.numel = numel;
    rows = {};
    rows.add(row);
    UpdateArgs<Sgd> result;
    result.tensors = rows.table(storage.param, storage.param, storage.full(), storage.has_master);
    result.tensors.has_remainder = storage.has_remainder;
    result.tensors.stochastic = storage.stochastic;
    result.tensors.has_ema = with_ema;
    result.tensors.ema = averages;
    group.lr.value = 0.1;
    result.groups = &group;
    result.num_groups = 1;
    result.scalars = &scalars;
    return result;
  }

  void update(CpuIsa isa, std::int64_t split, bool with_ema = true) {
    const UpdateArgs<Sgd> all = args(with_ema);
    for (std::int64_t begin = 0; begin < numel; begin += split) {
      fused_update_cpu(isa, all, begin, std::min(numel, begin + split));
    }
  }

  /// The value before and after a step, without rounding to 16 bits.
  double value(std::int64_t i) const { return storage.has_master ? master.get(i) : param.get(i); }
  double stepped(std::int64_t i) const { return value(i) - 0.1 * grad.get(i); }

  Storage storage;
  std::int64_t numel;
  Buffer param, grad, master, ema;
  EmaParams averages{0.9, 0.0, false};
  SgdParams group;
  TensorRow row;
  testing::Rows rows;
  float step = 5.0f;
  StepScalars scalars{1.0, 0.0f, 0.0f};
};

TEST(Ema, TheDriverMovesItTowardsTheNewValue) {
  for (const Storage& storage : kStorages) {
    for (const CpuIsa isa : testing::levels_here()) {
      SCOPED_TRACE(std::string(storage.name) + " at " + name_of(isa));
      const Problem before(storage, 1003, 1);
      Problem after(storage, 1003, 1);
      after.update(isa, 331);
      const double tolerance = storage.wide() ? 1e-15 : 1e-6;
      for (std::int64_t i = 0; i < before.numel; ++i) {
        const double expected = 0.9 * before.ema.get(i) + 0.1 * before.stepped(i);
        ASSERT_NEAR(after.ema.get(i), expected, tolerance * (1.0 + std::abs(expected))) << i;
      }
    }
  }
}

TEST(Ema, ACopyHasTheBitsOfTheMaster) {
  const Storage masters = kStorages[5];
  for (const Storage& storage : {kStorages[0], kStorages[1], masters}) {
    Problem problem(storage, 777, 0);
    problem.averages.start_step = 5.0;
    problem.update(detect_cpu_isa(), 777);
    EXPECT_TRUE(problem.ema == (storage.has_master ? problem.master : problem.param))
        << storage.name;
  }
}

TEST(Ema, LevelsSplitsAndAlignmentsGiveTheSameBits) {
  for (const Storage& storage : kStorages) {
    Problem expected(storage, 517, 0);
    expected.update(CpuIsa::kBaseline, 517);
    testing::record(expected.param, expected.master, expected.ema);
    for (const CpuIsa isa : testing::levels_here()) {
      for (const std::int64_t split : {517, 1, 37}) {
        for (const std::int64_t offset : {0, 3}) {
          Problem problem(storage, 517, offset);
          problem.update(isa, split);
          for (std::int64_t i = 0; i < 517; ++i) {
            ASSERT_EQ(problem.ema.get(i), expected.ema.get(i)) << storage.name << name_of(isa) << i;
          }
        }
      }
    }
  }
}

TEST(Ema, TheParameterDoesNotDependOnIt) {
  for (const Storage& storage : kStorages) {
    Problem with(storage, 517, 0);
    Problem without(storage, 517, 0);
    const Buffer ema = without.ema;
    with.update(detect_cpu_isa(), 517);
    without.update(detect_cpu_isa(), 517, false);
    EXPECT_TRUE(with.param == without.param) << storage.name;
    EXPECT_TRUE(with.master == without.master) << storage.name;
    EXPECT_TRUE(without.ema == ema) << storage.name;
    EXPECT_FALSE(with.ema == ema) << storage.name;
  }
}

TEST(Ema, ASkippedStepLeavesItAsItWas) {
  for (const Storage& storage : kStorages) {
    Problem problem(storage, 100, 0);
    const Buffer ema = problem.ema;
    problem.scalars.skip = 1.0f;
    problem.update(detect_cpu_isa(), 100);
    EXPECT_TRUE(problem.ema == ema) << storage.name;
  }
}

}  // namespace
}  // namespace torchfuse::kernels
