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

/// Factors and interval by which the loss scale changes.
struct ScaleRule {
  double growth_factor = 2.0;           ///< multiplies the scale after growth_interval clean steps
  double backoff_factor = 0.5;          ///< multiplies the scale after an overflow
  std::int64_t growth_interval = 2000;  ///< clean steps in a row before the scale grows
};

/// The smallest loss scale: the smallest normal fp32 number.
inline constexpr double kSmallestScale = 0x1p-126;
/// The largest loss scale: the largest whose reciprocal is a normal fp32 number.
inline constexpr double kLargestScale = 0x1p126;

/// Loss scaler options that torch.amp.GradScaler lacks. The defaults give torch's behavior.
struct ScalerExtras {
  std::int64_t hysteresis = 1;  ///< overflows in a row that trigger a backoff; each skips a step
  /// Lower bound for the scale at a backoff. `nullopt` and smaller values mean kSmallestScale.
  std::optional<double> min_scale;
  /// Upper bound for the scale at growth. `nullopt` and larger values mean kLargestScale.
  std::optional<double> max_scale;
  bool dynamic = true;  ///< false: static scale; overflows still skip their steps
  /// Name of a process group, registered as for all_reduce_(). An overflow on one rank makes all
  /// ranks skip the step. All ranks must make the same scaler calls. `nullopt` (default) disables
  /// communication.
  std::optional<std::string> process_group;
  std::int64_t history_size = 0;  ///< number of updates that scale_history() keeps
};

/// A scale update.
struct ScaleHistoryEntry {
  std::int64_t step;  ///< index of the update, from 0
  double scale;       ///< scale that the step used, before the update
  bool skipped;       ///< whether an optimizer's gradients overflowed
};

/// The device side of a loss scaler, for C++ and Python: the scale, its trackers and counts, and
/// one found_inf flag per optimizer and device. All are persistent tensors, so that a captured CUDA
/// graph can be replayed. GradScaler (C++) and torchfuse.amp.GradScaler (Python) check when each
/// call is allowed. An opaque key identifies an optimizer.
///
/// hysteresis_tracker(), counts() and scale_history() synchronize with the device. So do torch's
/// coalesce() of sparse fp16 gradients and copies of a CUDA scale for CPU gradients. Other calls do
/// not synchronize.
class TORCHFUSE_API GradScalerCore {
 public:
  using Key = std::uint64_t;  ///< identifies an optimizer, for example its address

  /// @throws c10::ValueError if an option is out of range, or if min_scale exceeds max_scale.
  explicit GradScalerCore(ScalerExtras extras = {});

  bool initialized() const { return scale_.defined(); }  ///< whether there is a scale
  /// Creates the scale and the growth tracker on `device`.
  /// @throws c10::Error during a CUDA graph capture.
  void initialize(const at::Device& device, double scale, std::int64_t growth_tracker);

  /// Returns the scale (1 element, fp32); undefined before initialize().
  const at::Tensor& scale() const { return scale_; }
  /// Returns the clean-step count since the last overflow or growth (1 element, int32);
  /// undefined before initialize().
  const at::Tensor& growth_tracker() const { return growth_tracker_; }
  /// Replaces the persistent scale (1 element, fp32). An undefined tensor removes the scale.
  void set_scale(at::Tensor scale);
  /// Replaces the persistent growth tracker (1 element, int32). An undefined tensor removes the
  /// tracker.
  void set_growth_tracker(at::Tensor growth_tracker);

  const ScalerExtras& extras() const { return extras_; }  ///< options given to the constructor

  /// Returns how many more overflows in a row trigger a backoff. Synchronizes with the device.
  std::int64_t hysteresis_tracker() const;
  /// Sets the value that hysteresis_tracker() returns, on the device if there is a scale.
  void set_hysteresis_tracker(std::int64_t value);

  /// Returns an int64 tensor [3]: updates, updates with an overflow, and whether the last update
  /// had an overflow (0 or 1). Undefined before initialize().
  const at::Tensor& step_counts() const { return counts_; }
  /// Returns step_counts() as numbers. Synchronizes with the device.
  std::vector<std::int64_t> counts() const;
  /// Sets the 3 values in step_counts().
  void set_counts(const std::vector<std::int64_t>& counts);
  /// Returns the last `history_size` updates, oldest first. Synchronizes with the device.
  std::vector<ScaleHistoryEntry> scale_history() const;

  /// Returns 1 / scale (0-dim, fp32), rounded once. All calls return the same tensor.
  const at::Tensor& inv_scale();

  /// Returns the optimizer's found_inf flag on `device` (0-dim, fp32), with the value of its last
  /// use. The first call creates the flag.
  at::Tensor found_inf(Key optimizer, const at::Device& device);

  /// Multiplies the gradients of `params` by `inv_scale` in place. For a sparse gradient,
  /// multiplies the values. Coalesces sparse fp16 gradients first, because sums of duplicates can
  /// overflow.
  /// @return one flag per device with gradients, non-zero if a gradient had a non-finite element.
  ///   With a process group, a single flag, combined over all ranks.
  /// @throws c10::ValueError for fp16 gradients unless `allow_fp16`, before anything is written.
  std::vector<at::Tensor> unscale_(Key optimizer, const std::vector<at::Tensor>& params,
                                   const at::Tensor& inv_scale, bool allow_fp16 = false);

  /// Returns the same flags as unscale_(), without unscaling. Reads dense gradients once.
  std::vector<at::Tensor> check(Key optimizer, const std::vector<at::Tensor>& params);

  /// Returns the maximum of one or more flags, on the scale's device. For several flags, the next
  /// call overwrites the result.
  at::Tensor combine(const std::vector<at::Tensor>& flags);

  /// Counts an update and adjusts the scale and the trackers. An overflow means that one of `flags`
  /// (at least one) is non-zero. With `adjust` false, only counts.
  void update(const std::vector<at::Tensor>& flags, const ScaleRule& rule, bool adjust = true);

 private:
  /// Returns the optimizer's flag on `device`. If `recorded` lacks the flag, clears and adds it.
  at::Tensor& record_found_inf(Key optimizer, const at::Device& device,
                               std::vector<at::Tensor>& recorded);
  /// Returns the flag combined over all ranks, or `recorded` without a process group.
  std::vector<at::Tensor> share(Key optimizer, std::vector<at::Tensor> recorded);
  void ensure_state();

  ScalerExtras extras_;
  std::int64_t init_hysteresis_tracker_;
  std::vector<std::int64_t> init_counts_ = {0, 0, 0};
  at::Tensor scale_;
  at::Tensor growth_tracker_;
  at::Tensor hysteresis_tracker_;  ///< only with hysteresis > 1
  at::Tensor counts_;
  at::Tensor history_;  ///< only with history_size > 0: ring buffer of rows {scale, overflow}
  at::Tensor reciprocal_;
  at::Tensor inv_scale_;
  at::Tensor combined_;  ///< see combine()
  std::unordered_map<Key, std::vector<at::Tensor>> found_inf_;
};

}  // namespace torchfuse::amp
