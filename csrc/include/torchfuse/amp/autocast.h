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
/// On exit, also by an exception, the guard restores the dtype, the enabled flag, the cache flag
/// and the nesting level. The outermost guard also clears the cache of weight casts. Guards are
/// neither copyable nor movable, because they must end in reverse order of construction.
///
///     {
///       torchfuse::amp::AutocastGuard autocast(torch::kCUDA, torch::kHalf);
///       loss = torch::nll_loss(model->forward(data), target);
///     }
///
/// Like torch's autocast state, a guard applies to the current thread only. A thread that is
/// started inside the scope needs another guard. Autograd runs backward passes without a guard. A
/// function whose backward depends on autocast uses CustomForward and CustomBackward.
class TORCHFUSE_API AutocastGuard {
 public:
  /// @param device_type kCPU or kCUDA.
  /// @param dtype dtype of the low-precision ops, kHalf or kBFloat16 (default: the device's current
  ///   autocast dtype).
  /// @param enabled false turns autocast off, as disabled() does, and accepts any `dtype`.
  /// @param cache_enabled whether to keep weight casts until the outermost guard ends (default:
  ///   unchanged).
  /// @throws c10::Error for any other device type or dtype, before anything is changed.
  [[nodiscard]] explicit AutocastGuard(c10::DeviceType device_type,
                                       std::optional<c10::ScalarType> dtype = std::nullopt,
                                       bool enabled = true,
                                       std::optional<bool> cache_enabled = std::nullopt);

  /// Returns a guard that turns autocast off, for full precision inside another guard's scope: the
  /// counterpart of `with torch.autocast(device_type, enabled=False)`. As in Python, tensors from
  /// outside the scope keep their dtype and must be cast explicitly.
  ///
  ///     const auto island = AutocastGuard::disabled(torch::kCUDA);
  ///     const torch::Tensor norm = features.to(torch::kFloat).square().sum();
  ///
  /// @param device_type kCPU or kCUDA.
  [[nodiscard]] static AutocastGuard disabled(c10::DeviceType device_type) {
    return AutocastGuard(device_type, std::nullopt, /*enabled=*/false);
  }

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
