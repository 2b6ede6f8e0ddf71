// SPDX-License-Identifier: BSD-3-Clause
// Launches of our kernels go through the pretended runtime's streams.
#include <functional>
#include <sstream>
#include <string>
#include <utility>

#include "cuda_on_cpu/engine.h"
#include "runtime/pretended_cuda.h"

namespace cuda_on_cpu {
namespace {

struct Launch {
  LaunchShape shape;
  std::function<void()> kernel;
};

int run(void* context) {
  const auto* const launch = static_cast<const Launch*>(context);
  if (run_grid(launch->shape, launch->kernel) != 0) {
    pretended_cuda_fault(cudaErrorLaunchFailure, last_fault().c_str());
  }
  clear_launches();
  return 1;
}

/// Whether the device runs code that nvcc makes for an entry of CMAKE_CUDA_ARCHITECTURES: machine
/// code ("90-real") within the same major version, PTX ("90-virtual") from its version on, or both.
bool runs(int capability, const std::string& entry) {
  const int of_entry = std::stoi(entry);
  if (capability < of_entry) return false;
  return entry.find("-real") == std::string::npos || capability / 10 == of_entry / 10;
}

bool has_code(int device) {
  int major = 0;
  int minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  std::istringstream entries(TORCHFUSE_CUDA_ARCHITECTURES);
  for (std::string entry; std::getline(entries, entry, ',');) {
    if (runs(major * 10 + minor, entry)) return true;
  }
  return false;
}

}  // namespace

int launch(void* stream, const LaunchShape& shape, std::function<void()> kernel) {
  static const bool compiled_for_this_device = has_code(0);
  if (!compiled_for_this_device) return cudaErrorNoKernelImageForDevice;
  if (const int error = check_shape(shape)) return error;
  const pretended_cuda_work work{"a kernel of torchfuse", run,
                                 [](void* context) { delete static_cast<Launch*>(context); },
                                 new Launch{shape, std::move(kernel)}, 0};
  return pretended_cuda_submit(static_cast<cudaStream_t>(stream), &work);
}

}  // namespace cuda_on_cpu
