// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <optional>

#include <torchfuse/export.h>

namespace torchfuse::amp {

/// Turns autocast on (or off) for the current thread until the end of the scope: the C++
/// counterpart of `with torch.autocast(device_type, dtype)`.
///
/// Restores the dtype, the enabled flag, the cache flag and the nesting level on exit, exceptions
/// included, and clears the weight-cast cache when the outermost guard ends. Neither copyable nor
/// movable: guards end in reverse order of their start.
///
///     {
///       torchfuse::amp::AutocastGuard autocast(torch::kCUDA, torch::kHalf);
///       loss = torch::nll_loss(model->forward(data), target);
///     }
class TORCHFUSE_API AutocastGuard {
 public:
  /// @param device_type kCPU or kCUDA.
  /// @param dtype type of the low-precision ops; by default the device's current autocast dtype.
  /// @param enabled false makes an fp32 island inside another guard.
  /// @param cache_enabled keep casts of weights for the whole outermost scope; default: as it is.
  explicit AutocastGuard(c10::DeviceType device_type,
                         std::optional<c10::ScalarType> dtype = std::nullopt, bool enabled = true,
                         std::optional<bool> cache_enabled = std::nullopt);
  ~AutocastGuard();
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;

 private:
  c10::DeviceType device_type_;
  c10::ScalarType previous_dtype_;
  bool previous_enabled_;
  bool previous_cache_enabled_;
};

}  // namespace torchfuse::amp
