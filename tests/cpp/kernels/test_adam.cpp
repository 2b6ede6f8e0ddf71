// SPDX-License-Identifier: BSD-3-Clause
// The update driver as its callers use it, with the Adam functor: on several threads, with
// hyper-parameters behind pointers, with denormal numbers.
#include <gtest/gtest.h>

#include <thread>

#include "optimizer_cases.h"
#include "optimizer_problem.h"

namespace torchfuse::kernels::testing {
namespace {

constexpr StepScalars kHalf{0.5, 0.0f, 0.0f};
const AdamParams kGroup = OptimizerCase<Adam>::group(9);

TEST(Adam, ThreadsMayShareATable) {
  const UpdateTuple tuple{DType::kBFloat16, DType::kFloat32, DType::kFloat32, true};
  float step = 3.0f;
  TensorList alone = at_offset(contents_of<Adam>(tuple, std::vector<std::int64_t>(200, 333)), 1);
  TensorList shared = alone;
  OptimizerProblem<Adam>(tuple, alone, {kGroup}, &step).run_on_cpu(kHalf);
  const OptimizerProblem<Adam> problem(tuple, shared, {kGroup}, &step);
  const UpdateArgs<Adam> args = problem.update(&kHalf);
  const std::int64_t total = problem.rows.offsets.back();
  std::vector<std::thread> threads;
  for (std::int64_t t = 0; t < 4; ++t) {
    threads.emplace_back(
        [&, t] { fused_update_cpu(detect_cpu_isa(), args, total * t / 4, total * (t + 1) / 4); });
  }
  for (std::thread& thread : threads) thread.join();
  expect_same_bits(shared, alone);
}

TEST(Adam, ReadsHyperParametersThroughPointers) {
  AdamParams by_value = kGroup;
  AdamParams by_pointer = kGroup;
  const float lr = static_cast<float>(by_value.lr.value);
  by_value.lr.value = static_cast<double>(lr);
  by_pointer.lr.value = -1;
  by_pointer.lr.pointer = &lr;
  float step = 3.0f;
  TensorList a = contents_of<Adam>({}, {100});
  TensorList b = a;
  OptimizerProblem<Adam>({}, a, {by_value}, &step).run_on_cpu(kHalf);
  OptimizerProblem<Adam>({}, b, {by_pointer}, &step).run_on_cpu(kHalf);
  expect_same_bits(a, b);
}

TEST(Adam, FlushesDenormalsAndRestoresTheMode) {
  float step = 3.0f;
  TensorList list = contents_of<Adam>({}, {64});
  for (std::int64_t i = 0; i < 64; ++i) {
    list[0].parts[kFirst].set(i, 1e-40);
    list[0].parts[kGrad].set(i, 0.0);
  }
  OptimizerProblem<Adam>({}, list, {kGroup}, &step).run_on_cpu(kHalf);
  for (std::int64_t i = 0; i < 64; ++i) EXPECT_EQ(list[0].parts[kFirst].get(i), 0.0);
  volatile float denormal = 1e-40f;
  EXPECT_NE(denormal * 0.5f, 0.0f) << "the caller's floating-point mode was changed";
}

}  // namespace
}  // namespace torchfuse::kernels::testing
