// SPDX-License-Identifier: BSD-3-Clause
// The measure and norms kernels against the CPU's phases: states and gradients with the same bits,
// norms up to the order of their sums; and the update behind them, given the same norms.
#include <gtest/gtest.h>

#include "device.h"
#include "kernels/cuda/typed_tuples.h"
#include "kernels/layerwise_problem.h"
#include "layerwise_on_device.h"

namespace torchfuse::kernels::testing {
namespace {

using HostOperands = LambOperands<Buffer>;
using DeviceOperands = LambOperands<DeviceTensor>;

std::vector<DeviceOperands> on_device(const std::vector<HostOperands>& list, bool aligned) {
  std::vector<DeviceOperands> copies;
  for (const HostOperands& operands : list) {
    const auto at = static_cast<std::int64_t>(aligned ? 0 : copies.size() + 1);
    copies.push_back({DeviceTensor(operands.param, at), DeviceTensor(operands.grad, at + 1),
                      DeviceTensor(operands.exp_avg, at), DeviceTensor(operands.exp_avg_sq, at),
                      DeviceTensor(operands.master, at), DeviceTensor(operands.ema, at)});
  }
  return copies;
}

void run_on_cpu(LambProblem<Buffer>& problem, const StepScalars& scalars) {
  const MeasureArgs<Lamb> args = problem.args(&scalars);
  const std::int64_t total = problem.rows.offsets.back();
  fused_measure_cpu(detect_cpu_isa(), args, 0, total);
  tensor_norms(args, 0, static_cast<std::int64_t>(problem.rows.rows.size()));
  fused_update_cpu(detect_cpu_isa(), args.update, 0, total);
}

void expect_bits_of_the_cpu(const LayerwiseTuple& tuple, const std::vector<std::int64_t>& sizes,
                            bool aligned, std::uint64_t seed, std::int64_t chunk = kNormChunk,
                            double grad_coef = 0.5) {
  std::vector<float> steps{1.0f, 7.0f};
  const StepScalars scalars{grad_coef, 0.0f, 0.0f};
  const DeviceArray<float> device_steps(steps);
  std::vector<HostOperands> expected = lamb_contents(tuple, sizes);
  for (HostOperands& operands : expected) {
    for (std::int64_t i = 0; i < operands.grad.numel(); ++i) {
      operands.grad.set(i, operands.grad.get(i) * (0.5 / grad_coef));
    }
  }
  std::vector<DeviceOperands> actual = on_device(expected, aligned);
  LambProblem<Buffer> host(tuple, expected, steps.data(), lamb_groups());
  LambProblem<DeviceTensor> device(tuple, actual, device_steps.data(), lamb_groups(), chunk);
  host.write_back = device.write_back = seed % 2 == 1;
  run_on_cpu(host, scalars);

  std::vector<double> found;
  ASSERT_NO_FATAL_FAILURE(step_on_device<Lamb>(host, device, scalars, seed, found));
  for (std::size_t t = 0; t < sizes.size(); ++t) {
    EXPECT_TRUE(actual[t].param.to_host() == expected[t].param) << "param of tensor " << t;
    EXPECT_TRUE(actual[t].grad.to_host() == expected[t].grad) << "grad of tensor " << t;
    EXPECT_TRUE(actual[t].exp_avg.to_host() == expected[t].exp_avg) << "exp_avg " << t;
    EXPECT_TRUE(actual[t].exp_avg_sq.to_host() == expected[t].exp_avg_sq) << "exp_avg_sq " << t;
    EXPECT_TRUE(actual[t].master.to_host() == expected[t].master) << "master of tensor " << t;
    EXPECT_TRUE(actual[t].ema.to_host() == expected[t].ema) << "average of tensor " << t;
  }
}

TEST(CudaLayerwise, GivesTheBitsOfTheCpu) {
  std::uint64_t seed = 0;
  for (const LayerwiseTuple& tuple : layerwise_tuples()) {
    for (const bool aligned : {true, false}) {
      SCOPED_TRACE("seed " + std::to_string(++seed) + (aligned ? "" : ", misaligned"));
      expect_bits_of_the_cpu(tuple, {0, 1, 31, 33, 512, 513, 5003, 16384, 16387}, aligned, seed);
    }
  }
}

TEST(CudaLayerwise, ATinyCoefficientGivesTheBitsOfTheCpu) {
  const DType f32 = DType::kFloat32;
  const DType bf16 = DType::kBFloat16;
  for (const LayerwiseTuple& tuple :
       {LayerwiseTuple{f32, f32, f32, false}, LayerwiseTuple{bf16, bf16, f32, true},
        LayerwiseTuple{f32, bf16, f32, false, bf16}}) {
    expect_bits_of_the_cpu(tuple, {1, 33, 513, 5003, 16387}, true, 61, kNormChunk, 0x1.8p-127);
  }
}

TEST(CudaLayerwise, SmallerChunksMeasureTheSame) {
  for (const std::int64_t chunk : {2048, 8192}) {
    expect_bits_of_the_cpu(layerwise_tuples().front(), {0, 512, 2048, 2049, 8192, 16387}, false, 50,
                           chunk);
  }
}

TEST(CudaLayerwise, GivesTheBitsOfTheCpuWhereTypesAreLookedUp) {
  std::uint64_t seed = 100;
  for (const LayerwiseTuple& tuple : mixed_layerwise_tuples()) {
    ASSERT_FALSE(has_typed_kernel(tuple.table(Rows()), Lamb::kNumStates));
    for (const bool aligned : {true, false}) {
      SCOPED_TRACE("seed " + std::to_string(++seed) + (aligned ? "" : ", misaligned"));
      expect_bits_of_the_cpu(tuple, {0, 1, 7, 9, 513, 5003, 16387}, aligned, seed);
    }
  }
}

TEST(CudaLayerwise, GivesTheAveragesOfTheCpu) {
  std::uint64_t seed = 200;
  for (const LayerwiseTuple& tuple : ema_layerwise_tuples()) {
    for (const bool aligned : {true, false}) {
      SCOPED_TRACE("seed " + std::to_string(++seed) + (aligned ? "" : ", misaligned"));
      expect_bits_of_the_cpu(tuple, {0, 1, 31, 33, 513, 5003, 16387}, aligned, seed);
    }
  }
}

TEST(CudaLayerwise, SmallListsOfMoreRowsThanALaunchHolds) {
  std::vector<std::int64_t> sizes(900, 3);
  sizes[450] = 700;
  expect_bits_of_the_cpu({DType::kFloat32, DType::kFloat32, DType::kFloat32, false}, sizes, true,
                         2);
}

TEST(CudaLayerwise, NormsDoNotDependOnTheOrderOfBlocksOrOnAddresses) {
  const LayerwiseTuple tuple{DType::kFloat32, DType::kFloat32, DType::kFloat32, false};
  const std::vector<std::int64_t> sizes{5, 700, 40001};
  std::vector<float> steps{1.0f, 7.0f};
  const DeviceArray<float> device_steps(steps);
  const DeviceArray<StepScalars> scalars({StepScalars{0.5, 0.0f, 0.0f}});
  std::vector<double> first;
  for (const std::uint64_t seed : {1u, 2u, 3u}) {
    const std::vector<HostOperands> list = lamb_contents(tuple, sizes);
    std::vector<DeviceOperands> operands = on_device(list, seed != 3);
    LambProblem<DeviceTensor> problem(tuple, operands, device_steps.data(), lamb_groups());
    const DeviceArray<MeasurePartial> partials(problem.partials);
    const DeviceArray<double> norms(problem.norms);
    set_order({.seed = seed});
    const Status status = fused_measure_cuda<Lamb>(
        problem.args(scalars.data(), partials.data(), norms.data()), stream());
    ASSERT_TRUE(status.ok()) << status.error << " " << status.what;
    synchronize();
    if (first.empty()) first = norms.to_host();
    EXPECT_EQ(norms.to_host(), first);
  }
}

// As for tensors that are split over processes: the phase stops at the sums, and goes on from them.
TEST(CudaLayerwise, SumsAreThePartialsOfASecondNormsPhase) {
  const LayerwiseTuple tuple{DType::kFloat32, DType::kFloat32, DType::kFloat32, false};
  const std::vector<std::int64_t> sizes{5, 0, 70000, 700};
  std::vector<float> steps{1.0f, 7.0f};
  const DeviceArray<float> device_steps(steps);
  const DeviceArray<StepScalars> scalars({StepScalars{0.5, 0.0f, 0.0f}});
  std::vector<double> expected;
  for (const bool in_two : {false, true}) {
    const std::vector<HostOperands> list = lamb_contents(tuple, sizes);
    std::vector<DeviceOperands> operands = on_device(list, true);
    LambProblem<DeviceTensor> problem(tuple, operands, device_steps.data(), lamb_groups());
    const DeviceArray<MeasurePartial> partials(problem.partials);
    const DeviceArray<MeasurePartial> sums(std::vector<MeasurePartial>(problem.norms.size()));
    const DeviceArray<double> norms(problem.norms);
    set_order({.seed = 3});
    auto args = problem.args(scalars.data(), partials.data(), norms.data());
    if (in_two) args.sums = sums.data();
    ASSERT_TRUE(fused_measure_cuda<Lamb>(args, stream()).ok());
    synchronize();
    if (!in_two) {
      expected = norms.to_host();
      continue;
    }
    EXPECT_EQ(norms.to_host(), problem.norms);
    const std::vector<std::int64_t> one_each{0, 1, 2, 3, 4};
    args.chunk_offsets = one_each.data();
    args.partials = args.sums;
    args.sums = nullptr;
    ASSERT_TRUE(tensor_norms_cuda<Lamb>(args, stream()).ok());
    synchronize();
    EXPECT_EQ(norms.to_host(), expected);
  }
}

TEST(CudaLayerwise, ASkippedStepTouchesNothing) {
  const LayerwiseTuple tuple{DType::kFloat32, DType::kFloat32, DType::kFloat32, false};
  std::vector<float> steps{0.0f, 0.0f};
  const DeviceArray<float> device_steps(steps);
  const DeviceArray<StepScalars> scalars({StepScalars{0.5, 0.0f, 1.0f}});
  const std::vector<HostOperands> list = lamb_contents(tuple, {5, 700});
  std::vector<DeviceOperands> operands = on_device(list, true);
  LambProblem<DeviceTensor> problem(tuple, operands, device_steps.data(), lamb_groups());
  const DeviceArray<MeasurePartial> partials(problem.partials);
  const DeviceArray<double> norms(problem.norms);
  set_order({.seed = 1});
  const auto args = problem.args(scalars.data(), partials.data(), norms.data());
  ASSERT_TRUE(fused_measure_cuda<Lamb>(args, stream()).ok());
  ASSERT_TRUE(fused_update_cuda<Lamb>(args.update, stream()).ok());
  synchronize();
  EXPECT_EQ(norms.to_host(), problem.norms);
  for (std::size_t t = 0; t < list.size(); ++t) {
    EXPECT_TRUE(operands[t].param.to_host() == list[t].param);
    EXPECT_TRUE(operands[t].exp_avg.to_host() == list[t].exp_avg);
  }
}

TEST(CudaLayerwise, Fp64BesideOtherTypesIsRefusedByName) {
  const LayerwiseTuple tuple{DType::kFloat64, DType::kFloat32, DType::kFloat64, false};
  std::vector<float> steps{1.0f, 7.0f};
  const StepScalars scalars{0.5, 0.0f, 0.0f};
  std::vector<HostOperands> list = lamb_contents(tuple, {5, 700});
  LambProblem<Buffer> problem(tuple, list, steps.data(), lamb_groups());
  const MeasureArgs<Lamb> args = problem.args(&scalars);
  for (const Status& status :
       {fused_measure_cuda<Lamb>(args, stream()), fused_update_cuda<Lamb>(args.update, stream())}) {
    EXPECT_NE(status.error, 0);
    EXPECT_NE(std::string(status.what).find("not built for this tuple"), std::string::npos)
        << status.what;
  }
}

}  // namespace
}  // namespace torchfuse::kernels::testing
