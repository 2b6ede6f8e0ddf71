// SPDX-License-Identifier: BSD-3-Clause
#include <torchfuse/amp/autocast.h>

#include <ATen/autocast_mode.h>
#include <c10/util/Exception.h>

namespace torchfuse::amp {
namespace {

namespace autocast = at::autocast;

// Initializes the first member, so that an invalid argument throws before anything is changed.
c10::DeviceType checked_device(c10::DeviceType device_type, std::optional<c10::ScalarType> dtype,
                               bool enabled) {
  TORCH_CHECK(device_type == c10::kCPU || device_type == c10::kCUDA,
              "AutocastGuard: expected device_type to be kCPU or kCUDA, got ", device_type, ".");
  TORCH_CHECK(!enabled || !dtype || *dtype == c10::kHalf || *dtype == c10::kBFloat16,
              "AutocastGuard: expected dtype to be kHalf or kBFloat16, got ", *dtype,
              ". Use AutocastGuard::disabled(device_type) for full precision.");
  return device_type;
}

}  // namespace

AutocastGuard::AutocastGuard(c10::DeviceType device_type, std::optional<c10::ScalarType> dtype,
                             bool enabled, std::optional<bool> cache_enabled)
    : device_type_(checked_device(device_type, dtype, enabled)),
      previous_dtype_(autocast::get_autocast_dtype(device_type)),
      previous_enabled_(autocast::is_autocast_enabled(device_type)),
      previous_cache_enabled_(autocast::is_autocast_cache_enabled()) {
  autocast::set_autocast_enabled(device_type_, enabled);
  if (dtype) autocast::set_autocast_dtype(device_type_, *dtype);
  if (cache_enabled) autocast::set_autocast_cache_enabled(*cache_enabled);
  autocast::increment_nesting();
}

AutocastGuard::~AutocastGuard() {
  // Weight casts that outlive the outermost guard would never be freed.
  if (autocast::decrement_nesting() == 0) autocast::clear_cache();
  autocast::set_autocast_enabled(device_type_, previous_enabled_);
  autocast::set_autocast_dtype(device_type_, previous_dtype_);
  autocast::set_autocast_cache_enabled(previous_cache_enabled_);
}

}  // namespace torchfuse::amp
