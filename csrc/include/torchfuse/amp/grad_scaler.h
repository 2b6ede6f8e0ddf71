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

/// Options of GradScaler; names and defaults as torch.amp.GradScaler. Those from `hysteresis` to
/// `allow_no_grads` are not in torch; see ScalerExtras.
struct GradScalerOptions {
  TORCH_ARG(double, init_scale) = 65536.0;          ///< first scale
  TORCH_ARG(double, growth_factor) = 2.0;           ///< after growth_interval clean steps; > 1
  TORCH_ARG(double, backoff_factor) = 0.5;          ///< after an overflow; < 1
  TORCH_ARG(std::int64_t, growth_interval) = 2000;  ///< clean steps before the scale grows
  TORCH_ARG(std::int64_t, hysteresis) = 1;          ///< overflows in a row that back the scale off
  TORCH_ARG(std::optional<double>, min_scale);      ///< no overflow takes the scale below
  TORCH_ARG(std::optional<double>, max_scale);      ///< no growth takes the scale above
  TORCH_ARG(bool, dynamic) = true;                  ///< false: the scale stays at init_scale
  TORCH_ARG(bool, allow_fp16_grads) = false;        ///< unscale_ takes fp16 gradients
  TORCH_ARG(std::optional<std::string>, process_group);  ///< one that overflows makes all skip
  TORCH_ARG(std::int64_t, history_size) = 0;             ///< updates in scale_history()
  TORCH_ARG(bool, allow_no_grads) = false;  ///< step and update accept that nothing has a gradient
  TORCH_ARG(bool, enabled) = true;          ///< false: all methods pass through
};

/// What torch.amp.GradScaler.state_dict() holds, and the hysteresis.
struct GradScalerState {
  double scale = 65536.0;                          ///< the loss scale
  double growth_factor = 2.0;                      ///< as in GradScalerOptions
  double backoff_factor = 0.5;                     ///< as in GradScalerOptions
  std::int64_t growth_interval = 2000;             ///< as in GradScalerOptions
  std::int64_t growth_tracker = 0;                 ///< clean steps since the scale last changed
  std::optional<std::int64_t> hysteresis_tracker;  ///< none: full
};

/// Dynamic loss scaling for LibTorch training loops, with the rules, defaults and error texts of
/// torch.amp.GradScaler. step() reads nothing back for optimizers of torchfuse::optim, and one flag
/// for others.
///
///     torchfuse::amp::GradScaler scaler(device);
///     scaler.scale(loss).backward();
///     scaler.step(optimizer);
///     scaler.update();
///
/// Optimizers are known by their address. Movable, not copyable: two scalers must not share a
/// scale.
class TORCHFUSE_API GradScaler {
 public:
  /// @param device where the scale is used; kCUDA without CUDA warns and disables the scaler, as
  /// torch's.
  /// @param options numbers that rule the scale, and whether there is scaling at all.
  explicit GradScaler(at::Device device, GradScalerOptions options = {});
  GradScaler(const GradScaler&) = delete;
  GradScaler& operator=(const GradScaler&) = delete;
  /// Movable, not copyable.
  GradScaler(GradScaler&&) noexcept = default;
  /// Movable, not copyable.
  GradScaler& operator=(GradScaler&&) noexcept = default;
  ~GradScaler() = default;

  /// Outputs times the scale, on their own device. The first call creates the scale there.
  at::Tensor scale(const at::Tensor& outputs);
  /// The same for several outputs, which may lie on different devices.
  std::vector<at::Tensor> scale(const std::vector<at::Tensor>& outputs);

  /// Divides the optimizer's gradients by the scale in place; at most once between updates.
  void unscale_(torch::optim::Optimizer& optimizer);
  /// Steps unless a gradient overflowed. Returns what the optimizer's step() returns; undefined
  /// where it was not called. A closure is refused, unless the scaler is disabled.
  at::Tensor step(torch::optim::Optimizer& optimizer,
                  torch::optim::Optimizer::LossClosure closure = nullptr);
  /// Adjusts the scale; call once per iteration, after all steps.
  void update();
  /// Sets the scale instead of adjusting it.
  void update(double new_scale);
  /// The same with the value of a 1-element tensor, which is copied on the device.
  void update(const at::Tensor& new_scale);

  double get_scale() const;            ///< reads the device
  bool last_step_skipped() const;      ///< in the last iteration, up to update(); reads the device
  std::int64_t skipped_steps() const;  ///< iterations in which a step was skipped; reads the device
  /// Three numbers of int64 on the device, written by update(): iterations, those in which a step
  /// was skipped, and whether the last one was. Undefined before the first scale().
  const at::Tensor& step_counts() const { return core_.step_counts(); }
  /// The last history_size iterations, oldest first: scale and skips. Reads the device.
  std::vector<ScaleHistoryEntry> scale_history() const { return core_.scale_history(); }
  /// As in GradScalerOptions.
  double get_growth_factor() const { return options_.growth_factor(); }
  void set_growth_factor(double new_factor);  ///< > 1
  /// As in GradScalerOptions.
  double get_backoff_factor() const { return options_.backoff_factor(); }
  void set_backoff_factor(double new_factor);  ///< < 1
  /// As in GradScalerOptions.
  std::int64_t get_growth_interval() const { return options_.growth_interval(); }
  void set_growth_interval(std::int64_t new_interval);  ///< >= 1
  std::int64_t get_growth_tracker() const;              ///< reads the device
  /// False if the options say so, or if CUDA was asked for and is not there.
  bool is_enabled() const { return options_.enabled(); }

  /// None when disabled. Reads the device; call it after update().
  std::optional<GradScalerState> state_dict() const;
  /// Checks every value before the first one is taken over. Nothing happens when disabled.
  void load_state_dict(const GradScalerState& state);
  /// Writes what state_dict() returns.
  void save(torch::serialize::OutputArchive& archive) const;
  /// Leaves the scaler as it was if the archive lacks a field or holds one of another type.
  void load(torch::serialize::InputArchive& archive);

 private:
  enum class Stage { kReady, kUnscaled, kStepped };
  /// What happened to one optimizer since the last update().
  struct OptimizerState {
    Stage stage = Stage::kReady;
    std::vector<at::Tensor> found_inf;  ///< one flag per device; empty before a check
  };

  void require_scale(const char* caller) const;
  ScaleRule rule() const;
  std::vector<at::Tensor> recorded_flags() const;
  /// Counts an iteration whose scale is set by hand, and begins the next.
  void count_only();
  at::Tensor step_fused(torchfuse::optim::FusedOptimizer& optimizer, OptimizerState& state);

  at::Device device_;
  GradScalerOptions options_;
  std::int64_t init_growth_tracker_ = 0;
  GradScalerCore core_;
  std::unordered_map<GradScalerCore::Key, OptimizerState> states_;
};

/// For torch::save(scaler, ...) and torch::load(scaler, ...).
inline torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                   const GradScaler& scaler) {
  scaler.save(archive);
  return archive;
}

inline torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                  GradScaler& scaler) {
  scaler.load(archive);
  return archive;
}

}  // namespace torchfuse::amp
