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

/// Flattened elements that a thread takes at least.
constexpr std::int64_t kGrainSize = 32768;

/// The instruction level in force.
kernels::CpuIsa current_cpu_isa();

/// The device's current stream (torch's).
kernels::Stream current_stream(const c10::Device& device);

/// Multiprocessors of a CUDA device.
int multiprocessors_of(const char* op, const c10::Device& device);

/// The capture that the device's current stream is part of: a number that no other one has.
std::optional<std::uint64_t> current_capture(const c10::Device& device);

/// Throws if a launcher failed: op, CUDA error name and text; where the current device is one for
/// which nothing was compiled, which one that is, and how to build for it.
void check_status(const char* op, const kernels::Status& status);

/// Runs `body(isa, begin, end)` over [first, last) on torch's CPU threads. The same range is split
/// in the same way every time.
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
