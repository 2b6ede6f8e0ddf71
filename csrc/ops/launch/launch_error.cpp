// SPDX-License-Identifier: BSD-3-Clause
// What a failed launch becomes. Nothing here is asked before a launch has failed: a card without
// code of its own may still run another's, or PTX, and only the driver knows.
#include <c10/util/Exception.h>

#include <string>

#include "ops/backend.h"

#if defined(TORCHFUSE_WITH_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace torchfuse::ops {

#if defined(TORCHFUSE_WITH_CUDA)
namespace {

/// Kernels take up to 32 KB of arguments, and hand over with acquire and release.
constexpr int kOldestCapability = 70;
/// CUDA 13 compiles for no older one.
constexpr int kOldestOfCuda13 = 75;

bool is_for_want_of_code(cudaError_t error) {
  return error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction ||
         error == cudaErrorUnsupportedPtxVersion;
}

std::string name_of_capability(int capability) {
  return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

/// What to do about a card for which nothing was compiled.
std::string remedy_for(int capability) {
  if (capability < kOldestCapability) return "Use a GPU of 7.0 or later, or the CPU.";
  const std::string list =
      name_of_capability(capability) + " pip install --no-cache-dir --force-reinstall --no-deps .";
  if (CUDART_VERSION >= 13000 && capability < kOldestOfCuda13) {
    return "Build it again for this one, with CUDA 12 and a torch for it, because CUDA 13 begins "
           "at "
           "7.5: TORCH_CUDA_ARCH_LIST=" +
           list;
  }
  return "Build it again for this one: TORCH_CUDA_ARCH_LIST=" + list;
}

/// The current device and its remedy; empty where it cannot be asked.
std::string want_of_code() {
  int device = 0;
  cudaDeviceProp card{};
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaGetDeviceProperties(&card, device) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return "";
  }
  const int capability = card.major * 10 + card.minor;
  return std::string("expected a GPU for which torchfuse was compiled, of compute capability ") +
         TORCHFUSE_CUDA_ARCHITECTURES + ", got cuda:" + std::to_string(device) + ", " + card.name +
         ", of " + name_of_capability(capability) + ". " + remedy_for(capability);
}

}  // namespace
#endif

void check_status(const char* op, const kernels::Status& status) {
  if (status.ok()) return;
#if defined(TORCHFUSE_WITH_CUDA)
  const auto error = static_cast<cudaError_t>(status.error);
  const std::string reason = is_for_want_of_code(error) ? want_of_code() : "";
  TORCH_CHECK(reason.empty(), op, ": ", reason);
  TORCH_CHECK(false, op, ": ", status.what, " failed with ", cudaGetErrorName(error), ": ",
              cudaGetErrorString(error), ".");
#else
  TORCH_CHECK(false, op, ": ", status.what, " failed with error ", status.error, ".");
#endif
}

}  // namespace torchfuse::ops
