// SPDX-License-Identifier: BSD-3-Clause
// The kernels of NovoGrad and LARS, whose states move in the update, against the CPU's phases.
#pragma once

#include <gtest/gtest.h>

#include "device.h"
#include "kernels/one_norm_problem.h"
#include "layerwise_on_device.h"

namespace torchfuse::kernels::testing {

inline std::vector<OneNormOperands<DeviceTensor>> on_device(
    const std::vector<OneNormOperands<Buffer>>& list, bool aligned) {
  std::vector<OneNormOperands<DeviceTensor>> copies;
  for (const OneNormOperands<Buffer>& operands : list) {
    const auto at = static_cast<std::int64_t>(aligned ? 0 : copies.size() + 1);
    copies.push_back({DeviceTensor(operands.param, at), DeviceTensor(operands.grad, at + 1),
                      DeviceTensor(operands.state, at), DeviceTensor(operands.master, at),
                      DeviceTensor(operands.ema, at), DeviceTensor(operands.tracked)});
  }
  return copies;
}

/// One step on both.
template <class Functor>
void expect_one_norm_bits_of_the_cpu(const LayerwiseTuple& tuple,
                                     const std::vector<typename Functor::Params>& groups,
                                     float step, bool aligned, std::uint64_t seed,
                                     const std::vector<std::int64_t>& sizes) {
  const StepScalars scalars{0.5, 0.0f, 0.0f};
  const DeviceArray<float> device_step(std::vector<float>{step});
  std::vector<OneNormOperands<Buffer>> expected = one_norm_contents(tuple, sizes);
  std::vector<OneNormOperands<DeviceTensor>> actual = on_device(expected, aligned);
  OneNormProblem<Functor, Buffer> host(tuple, expected, &step, groups);
  OneNormProblem<Functor, DeviceTensor> device(tuple, actual, device_step.data(), groups);
  host.write_back = device.write_back = seed % 2 == 1;
  host.run_on_cpu(scalars);

  std::vector<double> found;
  ASSERT_NO_FATAL_FAILURE(step_on_device<Functor>(host, device, scalars, seed, found));
  for (std::size_t t = 0; t < sizes.size(); ++t) {
    EXPECT_TRUE(actual[t].param.to_host() == expected[t].param) << "param of tensor " << t;
    EXPECT_TRUE(actual[t].grad.to_host() == expected[t].grad) << "grad of tensor " << t;
    EXPECT_TRUE(actual[t].state.to_host() == expected[t].state) << "state of tensor " << t;
    EXPECT_TRUE(actual[t].master.to_host() == expected[t].master) << "master of tensor " << t;
    EXPECT_TRUE(actual[t].ema.to_host() == expected[t].ema) << "average of tensor " << t;
    const double tracked = actual[t].tracked.to_host().get(0);
    const double exact = expected[t].tracked.get(0);
    EXPECT_NEAR(tracked, exact, 1e-5 * exact) << "norm that tensor " << t << " keeps";
    if (Functor::kTracksNorm && tuple.param == DType::kFloat64) {
      EXPECT_EQ(tracked, found[t]);
    }
  }
}

template <class Functor>
void expect_one_norm_bits_in_every_storage(const std::vector<typename Functor::Params>& groups) {
  const std::vector<std::int64_t> sizes{0, 1, 31, 33, 512, 513, 5003, 16387};
  std::uint64_t seed = 0;
  std::vector<LayerwiseTuple> tuples = layerwise_tuples();
  for (const auto& others : {mixed_layerwise_tuples(), ema_layerwise_tuples()}) {
    tuples.insert(tuples.end(), others.begin(), others.end());
  }
  for (const LayerwiseTuple& tuple : tuples) {
    for (const bool aligned : {true, false}) {
      SCOPED_TRACE("seed " + std::to_string(++seed) + (aligned ? "" : ", misaligned"));
      expect_one_norm_bits_of_the_cpu<Functor>(tuple, groups, seed % 3 == 0 ? 1.0f : 7.0f, aligned,
                                               seed, sizes);
    }
  }
}

}  // namespace torchfuse::kernels::testing
