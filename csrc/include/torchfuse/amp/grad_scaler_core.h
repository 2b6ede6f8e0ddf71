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

/// The numbers that control how the loss scale changes.
struct ScaleRule {
  double growth_factor = 2.0;           ///< multiplies the scale after growth_interval clean steps
  double backoff_factor = 0.5;          ///< multiplies the scale after an overflow
  std::int64_t growth_interval = 2000;  ///< clean steps in a row before the scale grows
};

/// The smallest loss scale: fp32 holds it as a normal number.
inline constexpr double kSmallestScale = 0x1p-126;
/// The largest loss scale: fp32 holds its reciprocal as a normal number.
inline constexpr double kLargestScale = 0x1p126;

/// Options of a loss scaler that torch.amp.GradScaler does not have. The defaults change nothing.
struct ScalerExtras {
  std::int64_t hysteresis = 1;      ///< overflows in a row that trigger a backoff; each skips
  std::optional<double> min_scale;  ///< lower bound at a backoff; none, or less: kSmallestScale
  std::optional<double> max_scale;  ///< upper bound of growth; none, or more: kLargestScale
  bool dynamic = true;              ///< false: static scale; overflows still skip their steps
  /// Name of a process group, registered as for all_reduce_(): an overflow in one process makes all
  /// skip. All processes must make the same calls of the scaler. None: nothing is exchanged.
  std::optional<std::string> process_group;
  std::int64_t history_size = 0;  ///< updates that scale_history() keeps
};

/// One update of the scale.
struct ScaleHistoryEntry {
  std::int64_t step;  ///< number of the update, from 0
  double scale;       ///< scale before the update, which the step used
  bool skipped;       ///< whether an optimizer's gradients overflowed
};

/// The device side of a loss scaler, for any host language: the scale, its trackers and counts, and
/// one found_inf flag per optimizer and device. All are persistent tensors, which a captured graph
/// can use again. GradScaler (C++) and torchfuse.amp.GradScaler (Python) add the rules on when each
/// call is allowed. Optimizers are identified by an opaque key. The device is read only by
/// hysteresis_tracker(), counts() and scale_history(), by torch's coalesce() of sparse fp16
/// gradients, and by copies of a scale on CUDA for gradients on the CPU.
class TORCHFUSE_API GradScalerCore {
 public:
  using Key = std::uint64_t;  ///< an optimizer's identity, such as its address

  /// @throws c10::ValueError for numbers out of range or out of order.
  explicit GradScalerCore(ScalerExtras extras = {});

  bool initialized() const { return scale_.defined(); }  ///< whether there is a scale
  /// Creates the scale and the growth tracker on `device`. Throws in a CUDA graph capture.
  void initialize(const at::Device& device, double scale, std::int64_t growth_tracker);

  /// Returns the scale (1 element, fp32); undefined before initialize().
  const at::Tensor& scale() const { return scale_; }
  /// Returns the number of clean steps since the last overflow or growth (1 element, int32);
  /// undefined before initialize().
  const at::Tensor& growth_tracker() const { return growth_tracker_; }
  /// Replaces the persistent scale (1 element, fp32); an undefined tensor removes it.
  void set_scale(at::Tensor scale);
  /// Replaces the persistent growth tracker (1 element, int32); an undefined tensor removes it.
  void set_growth_tracker(at::Tensor growth_tracker);

  const ScalerExtras& extras() const { return extras_; }  ///< options given to the constructor

  /// Returns how many more overflows in a row trigger a backoff. Reads the device.
  std::int64_t hysteresis_tracker() const;
  /// Sets the value of hysteresis_tracker(), on the device if there is a scale.
  void set_hysteresis_tracker(std::int64_t value);

  /// Returns the number of updates, the number of updates with an overflow, and whether the last
  /// update had one (3 elements, int64); undefined before initialize().
  const at::Tensor& step_counts() const { return counts_; }
  /// Returns the values of step_counts() as numbers. Reads the device.
  std::vector<std::int64_t> counts() const;
  /// Sets the 3 values of step_counts().
  void set_counts(const std::vector<std::int64_t>& counts);
  /// Returns the last `history_size` updates, oldest first. Reads the device.
  std::vector<ScaleHistoryEntry> scale_history() const;

  /// Returns 1 / scale (0-dim, fp32), rounded once, always in the same tensor.
  const at::Tensor& inv_scale();

  /// Returns the optimizer's found_inf flag on `device` (0-dim, fp32) as the last use left it.
  at::Tensor found_inf(Key optimizer, const at::Device& device);

  /// Multiplies the gradients of `params` by `inv_scale` in place. Sparse gradients are unscaled
  /// through their values; fp16 ones are coalesced first, because sums of duplicates can overflow.
  /// @return one flag per device that holds gradients, non-zero if one of them held a non-finite
  ///   element; with a process group, one flag in all, shared by the processes.
  /// @throws c10::ValueError for fp16 gradients unless `allow_fp16`, before anything is written.
  std::vector<at::Tensor> unscale_(Key optimizer, const std::vector<at::Tensor>& params,
                                   const at::Tensor& inv_scale, bool allow_fp16 = false);

  /// Returns the flags of unscale_() without unscaling: dense gradients are read once, not written.
  std::vector<at::Tensor> check(Key optimizer, const std::vector<at::Tensor>& params);

  /// Returns the maximum of one or more flags, on the scale's device. For several flags, the result
  /// is in a tensor that the next call overwrites.
  at::Tensor combine(const std::vector<at::Tensor>& flags);

  /// Counts an update, and adjusts the scale and its trackers to the overflow that `flags` (one or
  /// more) recorded. With `adjust` false, only counts.
  void update(const std::vector<at::Tensor>& flags, const ScaleRule& rule, bool adjust = true);

 private:
  /// Returns the optimizer's flag on `device`; if `recorded` lacks it, clears it and adds it.
  at::Tensor& record_found_inf(Key optimizer, const at::Device& device,
                               std::vector<at::Tensor>& recorded);
  /// Returns the combined flag of all processes of the group, or `recorded` without a group.
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
