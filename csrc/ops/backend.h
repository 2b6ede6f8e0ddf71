// SPDX-License-Identifier: BSD-3-Clause
// Where kernels run: the CPU's threads and instruction level, or a CUDA device's current stream.
#pragma once

#include <ATen/Parallel.h>
#include <c10/core/Device.h>
#include <torchfuse/device_copy.h>

#include <cstdint>
#include <optional>

#include "kernels/common/status.h"
#include "kernels/common/stream.h"
#include "kernels/cpu/isa.h"

namespace torchfuse::ops {

/// Minimum number of flattened elements per thread.
constexpr std::int64_t kGrainSize = 32768;

/// Returns the CPU instruction level that kernels currently use.
kernels::CpuIsa current_cpu_isa();

/// Returns torch's current stream on the device.
kernels::Stream current_stream(const c10::Device& device);

/// Returns the CUDA device's number of multiprocessors.
int multiprocessors_of(const char* op, const c10::Device& device);

/// Returns the unique id of the capture that contains the device's current stream, or nullopt
/// outside a capture.
std::optional<std::uint64_t> current_capture(const c10::Device& device);

/// Throws if a launcher failed, with the op, the CUDA error's name and text. If nothing was
/// compiled for the current device, the message names the device and says how to build for it.
void check_status(const char* op, const kernels::Status& status);

/// Runs `body(isa, begin, end)` over [first, last) on torch's CPU threads. Equal ranges are always
/// split in the same way.
template <class Body>
void parallel_over_elements(std::int64_t first, std::int64_t last, const Body& body) {
  const kernels::CpuIsa isa = current_cpu_isa();
  at::parallel_for(first, last, kGrainSize,
                   [&](std::int64_t begin, std::int64_t end) { body(isa, begin, end); });
}

template <class Body>
void parallel_over_elements(std::int64_t total, const Body& body) {
  parallel_over_elements(0, total, body);
}

}  // namespace torchfuse::ops
