// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <torchfuse/amp/grad_scaler_core.h>
#include <torchfuse/export.h>

namespace torchfuse::optim {
class FusedOptimizer;
}

namespace torchfuse::amp {

/// GradScaler's options, with names and defaults from torch.amp.GradScaler. The options from
/// `hysteresis` to `allow_no_grads` exist only in torchfuse; see also ScalerExtras.
struct GradScalerOptions {
  TORCH_ARG(double, init_scale) = 65536.0;          ///< initial loss scale, from 2^-126 to 2^126
  TORCH_ARG(double, growth_factor) = 2.0;           ///< multiplies the scale when it grows; > 1
  TORCH_ARG(double, backoff_factor) = 0.5;          ///< multiplies the scale at a backoff; < 1
  TORCH_ARG(std::int64_t, growth_interval) = 2000;  ///< clean steps before the scale grows; >= 1
  TORCH_ARG(std::int64_t, hysteresis) = 1;          ///< consecutive overflows per backoff; >= 1
  TORCH_ARG(std::optional<double>, min_scale);      ///< lower bound at a backoff (default 2^-126)
  TORCH_ARG(std::optional<double>, max_scale);      ///< upper bound of growth (default 2^126)
  TORCH_ARG(bool, dynamic) = true;                  ///< false: the scale stays at init_scale
  TORCH_ARG(bool, allow_fp16_grads) = false;        ///< unscale_() accepts fp16 gradients
  TORCH_ARG(std::optional<std::string>, process_group);  ///< group whose ranks skip together
  TORCH_ARG(std::int64_t, history_size) = 0;             ///< number of updates in scale_history()
  TORCH_ARG(bool, allow_no_grads) = false;  ///< accept step() and update() without gradients
  TORCH_ARG(bool, enabled) = true;          ///< false: all methods pass through
};

/// The fields of torch.amp.GradScaler.state_dict(), and the hysteresis tracker.
struct GradScalerState {
  double scale = 65536.0;                          ///< the loss scale
  double growth_factor = 2.0;                      ///< as in GradScalerOptions
  double backoff_factor = 0.5;                     ///< as in GradScalerOptions
  std::int64_t growth_interval = 2000;             ///< as in GradScalerOptions
  std::int64_t growth_tracker = 0;                 ///< clean steps since overflow or growth
  std::optional<std::int64_t> hysteresis_tracker;  ///< overflows left to a backoff; nullopt: all
};

/// Dynamic loss scaling for LibTorch training loops, with the rules, defaults and error messages of
/// torch.amp.GradScaler. For torchfuse::optim optimizers, step() does not synchronize with the
/// device, unless gradients are on the CPU and the scale is on CUDA. For other optimizers, step()
/// reads one flag from the device.
///
///     torchfuse::amp::GradScaler scaler(device);
///     scaler.scale(loss).backward();
///     scaler.step(optimizer);
///     scaler.update();
///
/// The scaler identifies an optimizer by its address. Scalers are movable but not copyable, because
/// two scalers must not share a scale.
class TORCHFUSE_API GradScaler {
 public:
  /// @param device training device; kCUDA without CUDA warns and disables the scaler.
  /// @param options see GradScalerOptions.
  /// @throws c10::Error for options out of range.
  explicit GradScaler(at::Device device, GradScalerOptions options = {});
  GradScaler(const GradScaler&) = delete;
  GradScaler& operator=(const GradScaler&) = delete;
  /// Movable, not copyable.
  GradScaler(GradScaler&&) noexcept = default;
  /// Movable, not copyable.
  GradScaler& operator=(GradScaler&&) noexcept = default;
  ~GradScaler() = default;

  /// Returns `outputs` times the scale, on the outputs' device. The first call creates the scale on
  /// that device.
  at::Tensor scale(const at::Tensor& outputs);
  /// Returns each output times the scale. The outputs may be on different devices.
  std::vector<at::Tensor> scale(const std::vector<at::Tensor>& outputs);

  /// Divides the optimizer's gradients by the scale in place.
  /// @throws c10::Error on a second call before update(), after step(), and for fp16 gradients
  ///   unless `allow_fp16_grads`.
  void unscale_(torch::optim::Optimizer& optimizer);
  /// Steps the optimizer unless a gradient overflowed.
  /// @return the result of the optimizer's step(), or an undefined tensor if the step was skipped.
  /// @throws c10::Error for a closure, unless the scaler is disabled, and on a second call before
  ///   update().
  at::Tensor step(torch::optim::Optimizer& optimizer,
                  torch::optim::Optimizer::LossClosure closure = nullptr);
  /// Adjusts the scale. Call update() once per iteration, after all steps.
  void update();
  /// Sets the scale to a number from 2^-126 to 2^126 instead of adjusting it.
  void update(double new_scale);
  /// Sets the scale to the value of a 1-element tensor, which is copied without synchronizing.
  void update(const at::Tensor& new_scale);

  double get_scale() const;  ///< loss scale, or 1 if disabled; synchronizes
  /// Returns whether the last iteration skipped a step. Synchronizes with the device.
  bool last_step_skipped() const;
  /// Returns whether the optimizer's last step was applied, that is, neither the optimizer nor the
  /// scaler skipped it. Synchronizes with the device only for a FusedOptimizer.
  bool last_step_applied(torch::optim::Optimizer& optimizer) const;
  std::int64_t skipped_steps() const;  ///< iterations that skipped a step; synchronizes
  /// Returns an int64 tensor [3] on the device, which update() writes: iterations, iterations that
  /// skipped a step, and whether the last iteration did (0 or 1). Undefined before the first
  /// scale().
  const at::Tensor& step_counts() const { return core_.step_counts(); }
  /// Returns the last `history_size` updates, oldest first. Synchronizes with the device.
  std::vector<ScaleHistoryEntry> scale_history() const { return core_.scale_history(); }
  /// Returns the growth factor; see GradScalerOptions.
  double get_growth_factor() const { return options_.growth_factor(); }
  void set_growth_factor(double new_factor);  ///< sets the growth factor; throws unless > 1
  /// Returns the backoff factor; see GradScalerOptions.
  double get_backoff_factor() const { return options_.backoff_factor(); }
  void set_backoff_factor(double new_factor);  ///< sets the backoff factor; throws unless < 1
  /// Returns the growth interval; see GradScalerOptions.
  std::int64_t get_growth_interval() const { return options_.growth_interval(); }
  void set_growth_interval(std::int64_t new_interval);  ///< sets the interval; throws unless >= 1
  std::int64_t get_growth_tracker() const;              ///< see GradScalerState; synchronizes
  /// Returns false if `enabled` is false, or if CUDA was requested but is not available.
  bool is_enabled() const { return options_.enabled(); }

  /// Returns the state, or `nullopt` if disabled. Synchronizes with the device. Call state_dict()
  /// after update().
  std::optional<GradScalerState> state_dict() const;
  /// Checks all values, and then replaces the scaler's state. A scale above 2^126, which torch's
  /// scaler allows, becomes 2^126 with a warning. Does nothing if disabled.
  /// @throws c10::Error for a value out of range; nothing is changed.
  void load_state_dict(const GradScalerState& state);
  /// Writes `enabled` and, unless disabled, the state.
  void save(torch::serialize::OutputArchive& archive) const;
  /// Reads an archive that save() wrote.
  /// @throws c10::Error for a missing field or a wrong type; nothing is changed.
  void load(torch::serialize::InputArchive& archive);

 private:
  enum class Stage { kReady, kUnscaled, kStepped };
  /// Progress of one optimizer since the last update().
  struct OptimizerState {
    Stage stage = Stage::kReady;
    std::vector<at::Tensor> found_inf;  ///< one flag per device; empty before a check
  };

  void require_scale(const char* caller) const;
  std::vector<at::Tensor> recorded_flags() const;
  /// Counts the iteration, adjusts the scale if `adjust` is true, and begins the next iteration.
  void count(bool adjust);
  at::Tensor step_fused(torchfuse::optim::FusedOptimizer& optimizer, OptimizerState& state);

  at::Device device_;
  GradScalerOptions options_;
  std::int64_t init_growth_tracker_ = 0;
  GradScalerCore core_;
  std::unordered_map<GradScalerCore::Key, OptimizerState> states_;
  /// Whether the last step was applied, for optimizers other than FusedOptimizer.
  std::unordered_map<GradScalerCore::Key, bool> applied_;
};

/// Writes a scaler to an archive, for torch::save(scaler, ...).
inline torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                   const GradScaler& scaler) {
  scaler.save(archive);
  return archive;
}

/// Reads a scaler from an archive, for torch::load(scaler, ...).
inline torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                  GradScaler& scaler) {
  scaler.load(archive);
  return archive;
}

}  // namespace torchfuse::amp
