// SPDX-License-Identifier: BSD-3-Clause
// The kernels of NovoGrad, and the number that it tracks for each tensor.
#include <gtest/gtest.h>

#include "kernels/functors/novograd.h"
#include "one_norm_on_device.h"

namespace torchfuse::kernels::testing {
namespace {

TEST(CudaNovoGrad, GivesTheBitsOfTheCpu) {
  expect_one_norm_bits_in_every_storage<NovoGrad>({novograd(0), novograd(6), novograd(11)});
}

TEST(CudaNovoGrad, MoreTensorsThanALaunchHoldsKeepTheirOwnNorms) {
  std::vector<std::int64_t> sizes(900, 3);
  sizes[450] = 700;
  expect_one_norm_bits_of_the_cpu<NovoGrad>(layerwise_tuples()[0], {novograd(0), novograd(5)}, 3.0f,
                                            true, 2, sizes);
}

TEST(CudaNovoGrad, ASkippedStepLeavesTheNorm) {
  const LayerwiseTuple tuple = layerwise_tuples()[0];
  const DeviceArray<float> step(std::vector<float>{0.0f});
  const DeviceArray<StepScalars> scalars({StepScalars{0.5, 0.0f, 1.0f}});
  const std::vector<OneNormOperands<Buffer>> list = one_norm_contents(tuple, {5, 700});
  std::vector<OneNormOperands<DeviceTensor>> operands = on_device(list, true);
  OneNormProblem<NovoGrad, DeviceTensor> problem(tuple, operands, step.data(), {novograd(0)});
  const DeviceArray<MeasurePartial> partials(problem.partials);
  const DeviceArray<double> norms(problem.norms);
  set_order({.seed = 1});
  const auto args = problem.args(scalars.data(), partials.data(), norms.data());
  ASSERT_TRUE(fused_measure_cuda<NovoGrad>(args, stream()).ok());
  ASSERT_TRUE(fused_update_cuda<NovoGrad>(args.update, stream()).ok());
  synchronize();
  for (std::size_t t = 0; t < list.size(); ++t) {
    EXPECT_TRUE(operands[t].tracked.to_host() == list[t].tracked);
    EXPECT_TRUE(operands[t].param.to_host() == list[t].param);
    EXPECT_TRUE(operands[t].state.to_host() == list[t].state);
  }
}

}  // namespace
}  // namespace torchfuse::kernels::testing
