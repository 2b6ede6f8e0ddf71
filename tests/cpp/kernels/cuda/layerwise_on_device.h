// SPDX-License-Identifier: BSD-3-Clause
// One step of an optimizer with norms of whole tensors on the device, beside the CPU's.
#pragma once

#include <gtest/gtest.h>

#include "device.h"
#include "kernels/layerwise_optimizer.h"

namespace torchfuse::kernels::testing {

/// Measures and updates on the device, and compares the norms with those of `host`, whose phases
/// have run. They are summed in another order there, so the update gets the host's. `norms` become
/// the device's.
template <class Functor, class HostProblem, class DeviceProblem>
void step_on_device(const HostProblem& host, DeviceProblem& device, const StepScalars& scalars,
                    std::uint64_t seed, std::vector<double>& norms) {
  const DeviceArray<StepScalars> device_scalars({scalars});
  const auto partials = DeviceArray<MeasurePartial>::unwritten(std::ssize(device.partials));
  const auto device_norms = DeviceArray<double>::unwritten(std::ssize(device.norms));
  set_order({.seed = seed, .flush_denormals = device.tuple.param != DType::kFloat64});
  const Status measured = fused_measure_cuda<Functor>(
      device.args(device_scalars.data(), partials.data(), device_norms.data()), stream());
  ASSERT_TRUE(measured.ok()) << measured.error << " " << measured.what;
  synchronize();
  norms = device_norms.to_host();
  for (std::size_t i = 0; i < norms.size(); ++i) {
    EXPECT_NEAR(norms[i], host.norms[i], 1e-5 * host.norms[i]) << "norm " << i;
  }
  const DeviceArray<double> same_norms(host.norms);
  const Status updated = fused_update_cuda<Functor>(
      device.args(device_scalars.data(), partials.data(), same_norms.data()).update, stream());
  ASSERT_TRUE(updated.ok()) << updated.error << " " << updated.what;
  synchronize();
}

}  // namespace torchfuse::kernels::testing
