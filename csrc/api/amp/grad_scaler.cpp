// SPDX-License-Identifier: BSD-3-Clause
// torch.amp.GradScaler's rules and error messages on top of GradScalerCore.
#include <torchfuse/amp/grad_scaler.h>

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <torch/cuda.h>

#include <cmath>
#include <limits>
#include <utility>

#include <torchfuse/device_copy.h>
#include <torchfuse/optim/fused_optimizer.h>

#include "api/optim/fused_optimizer_impl.h"

namespace torchfuse::amp {
namespace {

GradScalerCore::Key key_of(const torch::optim::Optimizer& optimizer) {
  return reinterpret_cast<GradScalerCore::Key>(&optimizer);
}

// Written so that NaN fails.
void check_growth_factor(double value) {
  TORCH_CHECK(value > 1.0, "The growth factor must be > 1.0.");
}

void check_backoff_factor(double value) {
  TORCH_CHECK(value < 1.0, "The backoff factor must be < 1.0.");
}

void check_growth_interval(std::int64_t value) {
  TORCH_CHECK(value >= 1, "GradScaler: expected growth_interval to be at least 1, got ", value,
              ".");
}

void check_scale(const char* name, double value) {
  TORCH_CHECK(std::isfinite(value) && value > 0.0, "GradScaler: expected ", name,
              " to be positive and finite, got ", value, ".");
  TORCH_CHECK(
      value >= kSmallestScale && value <= kLargestScale, "GradScaler: expected ", name,
      " to be from 2^-126 to 2^126, so that the scale and its reciprocal are normal fp32 numbers, "
      "got ",
      value, ".");
}

/// Returns a saved scale, limited to kLargestScale. torch's scaler saves larger scales too.
double loaded_scale(double scale) {
  if (!(scale > kLargestScale && scale <= std::numeric_limits<float>::max())) return scale;
  TORCH_WARN("GradScaler::load_state_dict: the state's scale is ", scale,
             ", and becomes 2^126: the reciprocal of a larger scale is not a normal fp32 number.");
  return kLargestScale;
}

ScalerExtras extras_of(const GradScalerOptions& options) {
  return {options.hysteresis(), options.min_scale(),     options.max_scale(),
          options.dynamic(),    options.process_group(), options.history_size()};
}

void check_state(const GradScalerState& state) {
  check_scale("the state's scale", state.scale);
  check_growth_factor(state.growth_factor);
  check_backoff_factor(state.backoff_factor);
  check_growth_interval(state.growth_interval);
  TORCH_CHECK(
      state.growth_tracker >= 0 && state.growth_tracker <= std::numeric_limits<std::int32_t>::max(),
      "GradScaler: expected the state's growth_tracker to be a 32-bit count, got ",
      state.growth_tracker, ".");
  const std::int64_t hysteresis = state.hysteresis_tracker.value_or(1);
  TORCH_CHECK(hysteresis >= std::numeric_limits<std::int32_t>::min() &&
                  hysteresis <= std::numeric_limits<std::int32_t>::max(),
              "GradScaler: expected the state's hysteresis_tracker to be a 32-bit count, got ",
              hysteresis, ".");
}

}  // namespace

GradScaler::GradScaler(at::Device device, GradScalerOptions options)
    : device_(device), options_(options), core_(extras_of(options_)) {
  if (options_.enabled() && device_.is_cuda() && !torch::cuda::is_available()) {
    TORCH_WARN("torchfuse::amp::GradScaler is enabled, but CUDA is not available. Disabling.");
    options_.enabled(false);
  }
  if (!options_.enabled()) return;
  check_scale("init_scale", options_.init_scale());
  check_growth_factor(options_.growth_factor());
  check_backoff_factor(options_.backoff_factor());
  check_growth_interval(options_.growth_interval());
}

void GradScaler::require_scale(const char* caller) const {
  TORCH_CHECK(
      core_.initialized(), "Attempted ", caller,
      " but _scale is None.  This may indicate your script did not use scaler.scale(loss or "
      "outputs) earlier in the iteration.");
}

at::Tensor GradScaler::scale(const at::Tensor& outputs) {
  if (!options_.enabled()) return outputs;
  TORCH_CHECK(outputs.defined(),
              "GradScaler.scale: expected outputs to be a tensor, got an undefined one.");
  if (!core_.initialized()) {
    core_.initialize(outputs.device(), options_.init_scale(), init_growth_tracker_);
  }
  return outputs * to_device(core_.scale(), outputs.device());
}

std::vector<at::Tensor> GradScaler::scale(const std::vector<at::Tensor>& outputs) {
  std::vector<at::Tensor> scaled;
  scaled.reserve(outputs.size());
  for (const at::Tensor& output : outputs) scaled.push_back(scale(output));
  return scaled;
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled()) return;
  require_scale("unscale_");
  const GradScalerCore::Key key = key_of(optimizer);
  OptimizerState& state = states_[key];
  TORCH_CHECK(state.stage != Stage::kUnscaled,
              "unscale_() has already been called on this optimizer since the last update().");
  TORCH_CHECK(state.stage != Stage::kStepped, "unscale_() is being called after step().");
  const auto* fused = dynamic_cast<const optim::FusedOptimizer*>(&optimizer);
  const auto& groups = fused != nullptr ? fused->groups_with_gradients() : optimizer.param_groups();
  state.found_inf =
      core_.unscale_(key, optim::params_of(groups), core_.inv_scale(), options_.allow_fp16_grads());
  if (fused != nullptr) fused->agree_on_overflow(state.found_inf);
  state.stage = Stage::kUnscaled;
}

at::Tensor GradScaler::step(torch::optim::Optimizer& optimizer,
                            torch::optim::Optimizer::LossClosure closure) {
  if (!options_.enabled()) return optimizer.step(std::move(closure));
  TORCH_CHECK(closure == nullptr,
              "Closure use is not currently supported if GradScaler is enabled.");
  require_scale("step");
  OptimizerState& state = states_[key_of(optimizer)];
  TORCH_CHECK(state.stage != Stage::kStepped,
              "step() has already been called since the last update().");

  at::Tensor result;
  if (auto* fused = dynamic_cast<optim::FusedOptimizer*>(&optimizer)) {
    result = step_fused(*fused, state);
  } else {
    if (state.stage == Stage::kReady) unscale_(optimizer);
    TORCH_CHECK(options_.allow_no_grads() || !state.found_inf.empty(),
                "No inf checks were recorded for this optimizer.");
    const bool overflowed =
        !state.found_inf.empty() && core_.combine(state.found_inf).item<float>() != 0.0f;
    if (!overflowed) result = optimizer.step();
    applied_[key_of(optimizer)] = !overflowed;
  }
  state.stage = Stage::kStepped;
  return result;
}

at::Tensor GradScaler::step_fused(torchfuse::optim::FusedOptimizer& optimizer,
                                  OptimizerState& state) {
  // Gradients may have been reset since unscale_(), and the scale may be on another device.
  const std::optional<at::Device> device = optimizer.device_of_grads();
  const bool scaled = state.stage == Stage::kReady;
  optim::ScalingRequest request;
  // With a process group, the ranks must combine their flags before the step.
  const bool check_first = scaled && options_.process_group().has_value();
  if (check_first) {
    state.found_inf =
        core_.check(key_of(optimizer), optim::params_of(optimizer.groups_with_gradients()));
    optimizer.agree_on_overflow(state.found_inf);
  }
  if (device && scaled) request.grad_scale = to_device(core_.scale(), *device);
  if (device && scaled && !check_first) {
    request.found_inf = core_.found_inf(key_of(optimizer), *device);
    request.check = request.found_inf_is_output = true;
    state.found_inf = {*request.found_inf};
  } else if (device && !state.found_inf.empty()) {
    request.found_inf = to_device(core_.combine(state.found_inf), *device);
  }
  optimizer.scaling_ = std::move(request);
  const auto clear_request = c10::make_scope_exit([&optimizer] { optimizer.scaling_.reset(); });
  // If step() throws, the flag does not describe the gradients.
  auto forget_flag = c10::make_scope_exit([&] {
    if (scaled) state.found_inf.clear();
  });
  at::Tensor result = optimizer.step();
  forget_flag.release();
  // If a user-defined step() did not set found_inf, clear the flag.
  if (optimizer.scaling_->found_inf_is_output) optimizer.scaling_->found_inf->zero_();
  return result;
}

std::vector<at::Tensor> GradScaler::recorded_flags() const {
  std::vector<at::Tensor> flags;
  for (const auto& [key, state] : states_) {
    flags.insert(flags.end(), state.found_inf.begin(), state.found_inf.end());
  }
  return flags;
}

void GradScaler::update() {
  if (!options_.enabled()) return;
  require_scale("update");
  TORCH_CHECK(options_.allow_no_grads() || !recorded_flags().empty(),
              "No inf checks were recorded prior to update. Call scaler.step(), with gradients.");
  count(/*adjust=*/true);
}

void GradScaler::update(double new_scale) {
  if (!options_.enabled()) return;
  require_scale("update");
  check_scale("new_scale", new_scale);
  count(/*adjust=*/false);
  core_.scale().fill_(new_scale);
}

void GradScaler::update(const at::Tensor& new_scale) {
  if (!options_.enabled()) return;
  require_scale("update");
  TORCH_CHECK(new_scale.defined() && new_scale.device().type() == device_.type() &&
                  new_scale.numel() == 1 && !new_scale.requires_grad(),
              "new_scale should be a float or a 1-element torch.cuda.FloatTensor or "
              "torch.FloatTensor with requires_grad=False.");
  count(/*adjust=*/false);
  core_.scale().copy_(new_scale.reshape({}));
}

void GradScaler::count(bool adjust) {
  const std::vector<at::Tensor> flags = recorded_flags();
  const ScaleRule rule{options_.growth_factor(), options_.backoff_factor(),
                       options_.growth_interval()};
  if (!flags.empty()) core_.update(flags, rule, adjust);
  // A new optimizer may reuse a destroyed optimizer's address.
  std::erase_if(applied_, [&](const auto& of) { return states_.count(of.first) == 0; });
  states_.clear();
}

bool GradScaler::last_step_skipped() const { return options_.enabled() && core_.counts()[2] != 0; }

bool GradScaler::last_step_applied(torch::optim::Optimizer& optimizer) const {
  if (const auto* fused = dynamic_cast<optim::FusedOptimizer*>(&optimizer)) {
    const at::Tensor skipped = fused->last_step_skipped();
    return skipped.defined() && skipped.item<double>() == 0.0;
  }
  const auto found = applied_.find(key_of(optimizer));
  return !options_.enabled() || (found != applied_.end() && found->second);
}

std::int64_t GradScaler::skipped_steps() const {
  return options_.enabled() ? core_.counts()[1] : 0;
}

double GradScaler::get_scale() const {
  if (!options_.enabled()) return 1.0;
  return core_.initialized() ? core_.scale().item<float>() : options_.init_scale();
}

std::int64_t GradScaler::get_growth_tracker() const {
  if (!options_.enabled()) return 0;
  return core_.initialized() ? core_.growth_tracker().item<std::int32_t>() : init_growth_tracker_;
}

void GradScaler::set_growth_factor(double new_factor) {
  check_growth_factor(new_factor);
  options_.growth_factor(new_factor);
}

void GradScaler::set_backoff_factor(double new_factor) {
  check_backoff_factor(new_factor);
  options_.backoff_factor(new_factor);
}

void GradScaler::set_growth_interval(std::int64_t new_interval) {
  check_growth_interval(new_interval);
  options_.growth_interval(new_interval);
}

std::optional<GradScalerState> GradScaler::state_dict() const {
  if (!options_.enabled()) return std::nullopt;
  return GradScalerState{get_scale(),
                         options_.growth_factor(),
                         options_.backoff_factor(),
                         options_.growth_interval(),
                         get_growth_tracker(),
                         core_.hysteresis_tracker()};
}

void GradScaler::load_state_dict(const GradScalerState& saved) {
  if (!options_.enabled()) return;
  GradScalerState state = saved;
  state.scale = loaded_scale(saved.scale);
  check_state(state);
  options_.init_scale(state.scale)
      .growth_factor(state.growth_factor)
      .backoff_factor(state.backoff_factor)
      .growth_interval(state.growth_interval);
  init_growth_tracker_ = state.growth_tracker;
  core_.set_hysteresis_tracker(state.hysteresis_tracker.value_or(options_.hysteresis()));
  if (core_.initialized()) {
    core_.scale().fill_(state.scale);
    core_.growth_tracker().fill_(state.growth_tracker);
  }
}

}  // namespace torchfuse::amp
