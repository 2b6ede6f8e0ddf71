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
///
/// As torch's state of autocast, a guard acts on its thread only; a thread that it starts, such as
/// one of a data-parallel program, needs a guard of its own. Autograd runs backward passes without
/// one: see CustomForward for functions whose backward has to know.
class TORCHFUSE_API AutocastGuard {
 public:
  /// @param device_type kCPU or kCUDA.
  /// @param dtype type of the low-precision ops, kHalf or kBFloat16; by default the device's
  /// current
  ///   autocast dtype.
  /// @param enabled false turns autocast off, as disabled() does; then `dtype` may be any.
  /// @param cache_enabled keep casts of weights for the whole outermost scope; default: as it is.
  /// @throws c10::Error for another device type or dtype, before anything is changed.
  [[nodiscard]] explicit AutocastGuard(c10::DeviceType device_type,
                                       std::optional<c10::ScalarType> dtype = std::nullopt,
                                       bool enabled = true,
                                       std::optional<bool> cache_enabled = std::nullopt);

  /// A guard that turns autocast off: an island of full precision within another guard, the
  /// counterpart of `with torch.autocast(device_type, enabled=False)`. As in Python, tensors that
  /// come from outside keep their type: cast them.
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
