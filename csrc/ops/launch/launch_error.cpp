// SPDX-License-Identifier: BSD-3-Clause
// What a failed launch becomes. Nothing here is asked before a launch has failed: a card without
// code of its own may still run another's, or PTX, and only the driver knows.
#include <c10/util/Exception.h>

#include <string>

#include "ops/backend.h"

#if defined(TORCHFUSE_WITH_CUDA)
#include "kernels/device.h"
#endif

namespace torchfuse::ops {

#if defined(TORCHFUSE_WITH_CUDA)
namespace {

/// Kernels take up to 32 KB of arguments, and hand over with acquire and release.
constexpr int kOldestCapability = 70;
/// CUDA 13 compiles for no older one.
constexpr int kOldestOfCuda13 = 75;

std::string name_of_capability(int capability) {
  return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

/// What to do about a card for which nothing was compiled.
std::string remedy_for(int capability) {
  if (capability < kOldestCapability) return "Use a GPU of 7.0 or later, or the CPU.";
  const std::string list =
      name_of_capability(capability) + " pip install --no-cache-dir --force-reinstall --no-deps .";
  if (kernels::compiled_with_cuda() >= 13 && capability < kOldestOfCuda13) {
    return "Build it again for this one, with CUDA 12 and a torch for it, because CUDA 13 begins "
           "at "
           "7.5: TORCH_CUDA_ARCH_LIST=" +
           list;
  }
  return "Build it again for this one: TORCH_CUDA_ARCH_LIST=" + list;
}

/// The current device and its remedy; empty where it cannot be asked.
std::string want_of_code() {
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
  const std::string reason = kernels::is_for_want_of_code(status.error) ? want_of_code() : "";
  TORCH_CHECK(reason.empty(), op, ": ", reason);
  TORCH_CHECK(false, op, ": ", status.what, " failed with ", kernels::error_name(status.error),
              ": ", kernels::error_text(status.error), ".");
#else
  TORCH_CHECK(false, op, ": ", status.what, " failed with error ", status.error, ".");
#endif
}

}  // namespace torchfuse::ops
