// SPDX-License-Identifier: BSD-3-Clause
// Error messages for failed launches. Nothing is queried before a launch fails, because a GPU for
// which nothing was compiled may still run another GPU's code or PTX, and only the driver knows.
#include <c10/util/Exception.h>

#include <string>

#include "ops/backend.h"

#if defined(TORCHFUSE_WITH_CUDA)
#include "kernels/device.h"
#endif

namespace torchfuse::ops {

#if defined(TORCHFUSE_WITH_CUDA)
namespace {

/// Kernels use up to 32 KB of arguments, and acquire and release operations.
constexpr int kOldestCapability = 70;
/// Oldest compute capability that CUDA 13 supports.
constexpr int kOldestOfCuda13 = 75;

std::string name_of_capability(int capability) {
  return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

/// Returns a remedy for a GPU for which nothing was compiled.
std::string remedy_for(int capability) {
  if (capability < kOldestCapability)
    return "Use a GPU of compute capability 7.0 or later, or the CPU.";
  const std::string list =
      name_of_capability(capability) + " pip install --no-cache-dir --force-reinstall --no-deps .";
  if (kernels::compiled_with_cuda() >= 13 && capability < kOldestOfCuda13) {
    return "Rebuild torchfuse for this GPU with CUDA 12 and a matching torch, because CUDA 13 "
           "supports only 7.5 and later: TORCH_CUDA_ARCH_LIST=" +
           list;
  }
  return "Rebuild torchfuse for this GPU: TORCH_CUDA_ARCH_LIST=" + list;
}

/// Returns the current device's name and remedy, or an empty string if the device cannot be
/// queried.
std::string missing_code_message() {
  const kernels::DeviceName card = kernels::current_device_name();
  if (card.capability == 0) return "";
  return std::string("expected a GPU for which torchfuse was compiled, of compute capability ") +
         kernels::compiled_capabilities() + ", got cuda:" + std::to_string(card.index) + ", " +
         card.name + ", of " + name_of_capability(card.capability) + ". " +
         remedy_for(card.capability);
}

}  // namespace
#endif

void check_status(const char* op, const kernels::Status& status) {
  if (status.ok()) return;
#if defined(TORCHFUSE_WITH_CUDA)
  const std::string reason = kernels::is_missing_code(status.error) ? missing_code_message() : "";
  TORCH_CHECK(reason.empty(), op, ": ", reason);
  TORCH_CHECK(false, op, ": ", status.what, " failed with ", kernels::error_name(status.error),
              ": ", kernels::error_text(status.error), ".");
#else
  TORCH_CHECK(false, op, ": ", status.what, " failed with error ", status.error, ".");
#endif
}

}  // namespace torchfuse::ops
