// SPDX-License-Identifier: BSD-3-Clause
// Options of all classes for storing parameters, masters, states and averages.
#pragma once

#include <ATen/Functions.h>
#include <c10/util/Exception.h>
#include <torchfuse/masters.h>

#include <cstddef>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

namespace torchfuse::optim {

template <class Options>
struct OptionsTraits;

/// Calls visit(key, value) for the dtype options of single states.
template <class Options, class Visit>
void visit_state_dtypes(Options& options, const Visit& visit) {
  using Traits = OptionsTraits<std::remove_const_t<Options>>;
  if constexpr (requires { Traits::state_dtypes(options, visit); }) {
    Traits::state_dtypes(options, visit);
  }
}

/// Calls visit(key, value) for the options that older archives may lack.
template <class Options, class Visit>
void visit_storage_options(Options& options, const Visit& visit) {
  visit("state_dtype", options.state_dtype());
  visit_state_dtypes(options, visit);
  visit("store_param_remainders", options.store_param_remainders());
  visit("stochastic_rounding", options.stochastic_rounding());
  visit("seed", options.seed());
  visit("ema_decay", options.ema_decay());
  visit("ema_warmup", options.ema_warmup());
  visit("ema_start_step", options.ema_start_step());
  visit("skip_norm_above", options.skip_norm_above());
}

template <class Options>
bool wants_master(const at::Tensor& param, const Options& options) {
  const at::ScalarType dtype = param.scalar_type();
  return options.master_weights() && (dtype == at::kHalf || dtype == at::kBFloat16);
}

/// Returns whether the parameter's master is stored as a remainder.
template <class Options>
bool keeps_remainder(const at::Tensor& param, const Options& options) {
  return options.store_param_remainders() && wants_master(param, options) &&
         param.scalar_type() == at::kBFloat16;
}

/// Returns the dtype of a parameter's new state `index`.
template <class Options>
at::ScalarType state_dtype(const at::Tensor& param, const Options& options, std::size_t index) {
  std::optional<at::ScalarType> own;
  std::size_t next = 0;
  visit_state_dtypes(options, [&](const char*, const std::optional<at::ScalarType>& dtype) {
    if (next++ <= index) own = dtype;
  });
  if (own.has_value()) return *own;
  if (options.state_dtype().has_value()) return *options.state_dtype();
  return param.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

/// Returns the slot's master: the state's master, or a new master. Converts between masters and
/// remainders as the options require.
template <class Options, class State>
at::Tensor master_of(const at::Tensor& param, const Options& options, const State& held) {
  const at::Tensor value = param.detach();
  if (keeps_remainder(param, options)) {
    if (held.param_remainder().defined()) return held.param_remainder();
    if (held.master_param().defined()) return remainder_of_master(held.master_param());
    return at::zeros_like(value, value.options().dtype(at::kShort), at::MemoryFormat::Preserve);
  }
  if (!held.master_param().defined() && held.param_remainder().defined()) {
    return master_of_remainder(value, held.param_remainder());
  }
  if (held.master_param().defined()) return held.master_param();
  return value.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true, at::MemoryFormat::Preserve);
}

/// Returns the slot's average: the state's average, or a copy of the master or parameter.
template <class Options, class State>
at::Tensor ema_of(const at::Tensor& param, const Options& options, const State& held,
                  const at::Tensor& master) {
  if (!options.ema_decay().has_value()) return {};
  if (held.ema_param().defined()) return held.ema_param();
  at::Tensor value = param.detach();
  if (master.defined() && master.scalar_type() == at::kShort) {
    value = master_of_remainder(value, master);
  } else if (master.defined()) {
    remake_master(value, master);  // the parameter may be newer
    value = master;
  }
  const at::ScalarType dtype = param.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return value.to(dtype, /*non_blocking=*/false, /*copy=*/true, at::MemoryFormat::Preserve);
}

/// Throws, naming `owner`, for invalid or contradictory options.
template <class Options>
void check_storage_options(const char* name, const std::string& owner, const Options& options) {
  TORCH_CHECK_VALUE(!options.store_param_remainders() || options.master_weights(), name,
                    ": expected ", owner,
                    ".master_weights to be true with store_param_remainders, got false. A "
                    "remainder holds the bits of an fp32 master that bf16 cannot hold.");
  TORCH_CHECK_VALUE(!options.stochastic_rounding() || !options.master_weights(), name,
                    ": expected ", owner,
                    ".master_weights to be false with stochastic_rounding, got true. "
                    "Parameters with masters need no stochastic rounding: set only one.");
  TORCH_CHECK_VALUE(options.seed() >= 0, name, ": expected ", owner, ".seed to be at least 0, got ",
                    options.seed(), ".");
  const double decay = options.ema_decay().value_or(0.0);
  TORCH_CHECK_VALUE(decay >= 0.0 && decay < 1.0, name, ": expected ", owner,
                    ".ema_decay to be none, or at least 0 and less than 1, got ", decay, ".");
  TORCH_CHECK_VALUE(options.ema_start_step() >= 0, name, ": expected ", owner,
                    ".ema_start_step to be at least 0, got ", options.ema_start_step(), ".");
}

/// Throws, naming the option, unless states of `params` support the dtype.
inline void check_state_dtype(const char* name, const std::string& option,
                              const std::optional<at::ScalarType>& value,
                              const std::vector<at::Tensor>& params) {
  if (!value.has_value()) return;
  for (std::size_t i = 0; i < params.size(); ++i) {
    const at::ScalarType dtype = params[i].scalar_type();
    const bool wide = dtype == at::kDouble;
    const bool fits = wide ? *value == at::kDouble
                           : *value == at::kFloat || *value == at::kBFloat16 || *value == at::kHalf;
    TORCH_CHECK_VALUE(fits, name, ": expected ", option, " to be ",
                      wide ? "Double" : "Float, BFloat16 or Half", " for params[", i, "] of dtype ",
                      dtype, ", got ", *value, ".");
  }
}

/// Throws, naming the parameter, if the options do not support the parameter's dtype.
template <class Options>
void check_storage(const char* name, const std::string& owner, const Options& options,
                   const std::vector<at::Tensor>& params) {
  constexpr const char* kRemedy = " in a separate group for other parameters.";
  visit_storage_options(options, [&](const char* key, const auto& value) {
    if constexpr (std::is_same_v<decltype(value), const std::optional<at::ScalarType>&>) {
      check_state_dtype(name, owner + "." + key, value, params);
    }
  });
  if (!options.store_param_remainders() && !options.stochastic_rounding()) return;
  bool any_bf16 = params.empty();
  for (std::size_t i = 0; i < params.size(); ++i) {
    const at::ScalarType dtype = params[i].scalar_type();
    any_bf16 = any_bf16 || dtype == at::kBFloat16;
    TORCH_CHECK_VALUE(!options.stochastic_rounding() || dtype == at::kBFloat16, name, ": expected ",
                      owner, ".params[", i, "] to be BFloat16 with stochastic_rounding, got ",
                      dtype, ". Set stochastic_rounding(false)", kRemedy);
    TORCH_CHECK_VALUE(!options.store_param_remainders() || dtype != at::kHalf, name, ": expected ",
                      owner, ".params[", i, "] to be BFloat16 with store_param_remainders, got ",
                      dtype, ". Set store_param_remainders(false)", kRemedy);
  }
  TORCH_CHECK_VALUE(!options.store_param_remainders() || any_bf16, name, ": expected ", owner,
                    " to hold a BFloat16 parameter with store_param_remainders, got none. Set "
                    "store_param_remainders(false)",
                    kRemedy);
}

}  // namespace torchfuse::optim
