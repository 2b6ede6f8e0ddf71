// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

#include <torchfuse/export.h>

namespace torchfuse::amp {

/// Numbers that rule how the loss scale moves.
struct ScaleRule {
  double growth_factor = 2.0;           ///< multiplies the scale after growth_interval clean steps
  double backoff_factor = 0.5;          ///< multiplies the scale after an overflow
  std::int64_t growth_interval = 2000;  ///< clean steps in a row before the scale grows
};

/// The device side of a loss scaler, for any host language: the scale, its trackers, and one
/// found_inf slot per optimizer and device, all persistent tensors, so that a captured graph finds
/// them again. GradScaler (C++) and torchfuse.amp.GradScaler (Python) add the rules on when each
/// call is allowed. Optimizers are known by an opaque key. Nothing here reads the device, except
/// hysteresis_tracker().
class TORCHFUSE_API GradScalerCore {
 public:
  using Key = std::uint64_t;  ///< an optimizer's identity, such as its address

  /// @param hysteresis overflows in a row that back the scale off; 1 is torch's rule.
  explicit GradScalerCore(std::int64_t hysteresis = 1);

  bool initialized() const { return scale_.defined(); }  ///< whether there is a scale
  /// Creates scale and growth tracker on `device`, with these values.
  void initialize(const at::Device& device, double scale, std::int64_t growth_tracker);

  /// The scale, 1 element of fp32; undefined before initialize().
  const at::Tensor& scale() const { return scale_; }
  /// Clean steps since the scale last changed, 1 element of int32; undefined before initialize().
  const at::Tensor& growth_tracker() const { return growth_tracker_; }
  /// Replaces the persistent scale (1 element, fp32); an undefined tensor forgets it.
  void set_scale(at::Tensor scale);
  /// Replaces the persistent growth tracker (1 element, int32); an undefined tensor forgets it.
  void set_growth_tracker(at::Tensor growth_tracker);

  /// Overflows in a row that back the scale off.
  std::int64_t hysteresis() const { return hysteresis_; }
  /// Overflows in a row that are left before the scale backs off. Reads the device.
  std::int64_t hysteresis_tracker() const;
  /// Sets that count, on the device if there is a scale.
  void set_hysteresis_tracker(std::int64_t value);

  /// 1 / scale, rounded once.
  at::Tensor inv_scale() const;

  /// The optimizer's found_inf slot on `device`, set to zero: a 0-dim fp32 tensor.
  at::Tensor clear_slot(Key optimizer, const at::Device& device);

  /// Multiplies the gradients of `params` by `inv_scale` in place and returns the slots, one per
  /// device that holds gradients, each non-zero if one of its gradients held a non-finite element.
  /// Sparse gradients are unscaled through their values; fp16 ones are coalesced first, because
  /// adding up duplicates can overflow.
  /// @throws c10::ValueError for fp16 gradients unless `allow_fp16`, before anything is written.
  std::vector<at::Tensor> unscale_(Key optimizer, const std::vector<at::Tensor>& params,
                                   const at::Tensor& inv_scale, bool allow_fp16 = false);

  /// As unscale_, but looks only: dense gradients are read once and not written.
  std::vector<at::Tensor> check(Key optimizer, const std::vector<at::Tensor>& params);

  /// The maximum of one or more slots, on the scale's device.
  at::Tensor combine(const std::vector<at::Tensor>& slots) const;

  /// Adjusts scale and trackers to the overflow that `slots` recorded (one or more).
  void update(const std::vector<at::Tensor>& slots, const ScaleRule& rule);

 private:
  /// The optimizer's slot on `device` within this check, cleared when the check first meets the
  /// device.
  at::Tensor& record_slot(Key optimizer, const at::Device& device,
                          std::vector<at::Tensor>& recorded);
  void ensure_hysteresis_tracker();

  std::int64_t hysteresis_;
  std::int64_t init_hysteresis_tracker_;
  at::Tensor scale_;
  at::Tensor growth_tracker_;
  at::Tensor hysteresis_tracker_;  ///< only with hysteresis > 1
  std::unordered_map<Key, std::vector<at::Tensor>> slots_;
};

}  // namespace torchfuse::amp
