// SPDX-License-Identifier: BSD-3-Clause
// CUDA runtime queries for the layers above, in builds with CUDA. All CUDA runtime calls come from
// this library, so that a process has only one copy of the runtime besides torch's.
#pragma once

#include <cstdint>

#include "kernels/common/status.h"
#include "kernels/common/stream.h"

namespace torchfuse::kernels {

/// Stores a device's number of multiprocessors.
Status multiprocessor_count(int device, int* count);

/// Stores the id of the capture that records a stream's work on the current device, or 0 if no
/// capture does.
Status capture_id(Stream stream, std::uint64_t* id);

/// The current device. Fields are zero if the device cannot be queried.
struct DeviceName {
  int index = 0;
  int capability = 0;  ///< 90 for 9.0
  char name[256] = "";
};
DeviceName current_device_name();

/// The runtime's name for a Status::error, for example "cudaErrorInvalidValue", and its
/// description.
const char* error_name(int error);
const char* error_text(int error);

/// Returns whether the error means that this library contains neither machine code nor PTX for the
/// device.
bool is_missing_code(int error);

/// The compute capabilities for which the kernels were compiled, for example "8.0, 9.0+PTX", and
/// the compiler's major version.
const char* compiled_capabilities();
int compiled_with_cuda();

}  // namespace torchfuse::kernels
