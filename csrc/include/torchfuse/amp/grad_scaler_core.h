// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
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

/// What a loss scaler does beyond torch.amp.GradScaler; by default nothing.
struct ScalerExtras {
  std::int64_t hysteresis = 1;      ///< overflows in a row that back the scale off; each skips
  std::optional<double> min_scale;  ///< no overflow takes the scale below
  std::optional<double> max_scale;  ///< no growth takes the scale above
  bool dynamic = true;              ///< false: the scale stays; overflows still skip their steps
  /// Name of a process group over which overflows are shared: one process that overflows makes all
  /// skip. Registered as all_reduce_() says; all processes call the scaler alike.
  std::optional<std::string> process_group;
  std::int64_t history_size = 0;  ///< updates that scale_history() remembers
};

/// One update of the scale.
struct ScaleHistoryEntry {
  std::int64_t step;  ///< its number, from 0 on
  double scale;       ///< before the update: the scale that the step used
  bool skipped;       ///< whether an optimizer's gradients overflowed
};

/// The device side of a loss scaler, for any host language: the scale, its trackers and counts, and
/// one found_inf flag per optimizer and device, all persistent tensors, so that a captured graph
/// finds them again. GradScaler (C++) and torchfuse.amp.GradScaler (Python) add the rules on when
/// each call is allowed. Optimizers are known by an opaque key. Only hysteresis_tracker(), counts()
/// and scale_history() read the device, torch's coalesce() of sparse fp16 gradients, and what is
/// copied to gradients on the CPU from a scale on CUDA.
class TORCHFUSE_API GradScalerCore {
 public:
  using Key = std::uint64_t;  ///< an optimizer's identity, such as its address

  /// @throws c10::ValueError for numbers out of range or out of order.
  explicit GradScalerCore(ScalerExtras extras = {});

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

  const ScalerExtras& extras() const { return extras_; }  ///< as given

  /// Overflows in a row that are left before the scale backs off. Reads the device.
  std::int64_t hysteresis_tracker() const;
  /// Sets that count, on the device if there is a scale.
  void set_hysteresis_tracker(std::int64_t value);

  /// Updates, updates with an overflow, and whether the last one had one: 3 elements of int64;
  /// undefined before initialize().
  const at::Tensor& step_counts() const { return counts_; }
  /// The same as numbers. Reads the device.
  std::vector<std::int64_t> counts() const;
  /// Sets them.
  void set_counts(const std::vector<std::int64_t>& counts);
  /// The last history_size updates, oldest first. Reads the device.
  std::vector<ScaleHistoryEntry> scale_history() const;

  /// 1 / scale, rounded once, always in the same tensor.
  const at::Tensor& inv_scale();

  /// The optimizer's found_inf flag on `device`, set to zero: a 0-dim fp32 tensor.
  at::Tensor clear_found_inf(Key optimizer, const at::Device& device);

  /// Multiplies the gradients of `params` by `inv_scale` in place and returns the flags, one per
  /// device that holds gradients, each non-zero if one of its gradients held a non-finite element;
  /// with a process group one flag in all, shared by the processes. Sparse gradients are unscaled
  /// through their values; fp16 ones are coalesced first, because adding up duplicates can
  /// overflow.
  /// @throws c10::ValueError for fp16 gradients unless `allow_fp16`, before anything is written.
  std::vector<at::Tensor> unscale_(Key optimizer, const std::vector<at::Tensor>& params,
                                   const at::Tensor& inv_scale, bool allow_fp16 = false);

  /// As unscale_, but looks only: dense gradients are read once and not written.
  std::vector<at::Tensor> check(Key optimizer, const std::vector<at::Tensor>& params);

  /// The maximum of one or more flags, on the scale's device. Several are combined in one tensor
  /// that the next call overwrites.
  at::Tensor combine(const std::vector<at::Tensor>& flags);

  /// Counts and adjusts scale and trackers to the overflow that `flags` recorded (one or more).
  /// `adjust` false only counts.
  void update(const std::vector<at::Tensor>& flags, const ScaleRule& rule, bool adjust = true);

 private:
  /// The optimizer's flag on `device` within this check, cleared when the check first meets the
  /// device.
  at::Tensor& record_found_inf(Key optimizer, const at::Device& device,
                               std::vector<at::Tensor>& recorded);
  /// What the processes of the group have found together; `recorded` itself without a group.
  std::vector<at::Tensor> share(Key optimizer, std::vector<at::Tensor> recorded);
  void ensure_state();

  ScalerExtras extras_;
  std::int64_t init_hysteresis_tracker_;
  std::vector<std::int64_t> init_counts_ = {0, 0, 0};
  at::Tensor scale_;
  at::Tensor growth_tracker_;
  at::Tensor hysteresis_tracker_;  ///< only with hysteresis > 1
  at::Tensor counts_;
  at::Tensor history_;  ///< only with history_size > 0: a ring of rows {scale, overflow}
  at::Tensor reciprocal_;
  at::Tensor inv_scale_;
  at::Tensor combined_;  ///< see combine()
  std::unordered_map<Key, std::vector<at::Tensor>> found_inf_;
};

}  // namespace torchfuse::amp
