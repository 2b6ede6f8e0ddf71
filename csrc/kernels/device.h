// SPDX-License-Identifier: BSD-3-Clause
// What the layers above ask the CUDA runtime. They have none of their own: all of its calls come
// from this library, so that a process has one copy of it beside torch's. Only in builds with CUDA.
#pragma once

#include <cstdint>

#include "kernels/common/status.h"
#include "kernels/common/stream.h"

namespace torchfuse::kernels {

/// Stores the number of multiprocessors of a device.
Status multiprocessor_count(int device, int* count);

/// Stores the id of the capture that records what is enqueued on a stream of the current device; 0
/// if none does.
Status capture_id(Stream stream, std::uint64_t* id);

/// The current device, with fields of zero where it cannot be asked.
struct DeviceName {
  int index = 0;
  int capability = 0;  ///< 90 for 9.0
  char name[256] = "";
};
DeviceName current_device_name();

/// The runtime's name of a Status::error, as "cudaErrorInvalidValue", and its sentence.
const char* error_name(int error);
const char* error_text(int error);

/// Whether an error says that a device has no machine code in this library, nor PTX for it.
bool is_for_want_of_code(int error);

/// What the kernels were compiled for, as "8.0, 9.0+PTX", and the major version of the compiler.
const char* compiled_capabilities();
int compiled_with_cuda();

}  // namespace torchfuse::kernels
