// SPDX-License-Identifier: BSD-3-Clause
// Saves and loads fused optimizers. Loading checks all values before replacing any.
#pragma once

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torchfuse/optim/fused_optimizer.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "api/optim/options_traits.h"

namespace torchfuse::optim {

/// Copies a loaded state tensor to the parameter's layout and device. Returns an undefined tensor
/// unchanged. `name` is "<class>: expected the archive's <tensor>".
inline torch::Tensor checked_state(const torch::Tensor& loaded, const at::Tensor& param,
                                   const std::string& name,
                                   const std::vector<at::ScalarType>& dtypes) {
  if (!loaded.defined()) return {};
  TORCH_CHECK_VALUE(loaded.sizes() == param.sizes(), name, " to have the sizes ", param.sizes(),
                    " of its parameter, got ", loaded.sizes(), ".");
  const at::ScalarType found = loaded.scalar_type();
  const bool known = std::find(dtypes.begin(), dtypes.end(), found) != dtypes.end();
  TORCH_CHECK_VALUE(known, name, " to have dtype ", c10::Join(" or ", dtypes), " for a ",
                    param.scalar_type(), " parameter, got ", found, ".");
  torch::Tensor own =
      at::empty_like(param.detach(), param.options().dtype(found), at::MemoryFormat::Preserve);
  own.copy_(loaded);
  return own;
}

/// Like checked_state(), for a state with one number per parameter.
inline torch::Tensor checked_number(const torch::Tensor& loaded, const at::Tensor& param,
                                    const std::string& name) {
  if (!loaded.defined()) return {};
  const at::ScalarType dtype = param.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  TORCH_CHECK_VALUE(loaded.dim() == 0 && loaded.scalar_type() == dtype, name, " to be a 0-dim ",
                    dtype, " tensor for a ", param.scalar_type(), " parameter, got a ",
                    loaded.dim(), "-dim ", loaded.scalar_type(), " tensor.");
  return loaded.detach().to(param.device(), dtype, /*non_blocking=*/false, /*copy=*/true);
}

inline torch::Tensor checked_step(const torch::Tensor& loaded, const std::string& name) {
  TORCH_CHECK_VALUE(loaded.dim() == 0 && loaded.scalar_type() == at::kFloat, name,
                    " to be a 0-dim Float tensor, got a ", loaded.dim(), "-dim ",
                    loaded.scalar_type(), " tensor.");
  const double count = loaded.item<double>();
  TORCH_CHECK_VALUE(std::isfinite(count) && count >= 0.0 && count == std::floor(count), name,
                    " to be a finite integer >= 0, got ", count, ".");
  return loaded.clone();
}

/// Reads and checks one parameter's state. `name` is the state's path in the archive.
template <class Options, class State, class Archive>
std::unique_ptr<State> read_state(Archive& archive, const at::Tensor& param, const Options& options,
                                  const std::string& name) {
  using Traits = OptionsTraits<Options>;
  const std::string expected = std::string(Traits::kName) + ": expected the archive";
  const auto where = [&](const char* key) { return expected + "'s " + name + "." + key; };
  State loaded;
  read_tensors<Options>(archive, loaded);
  const auto require = [&](bool holds, const char* key) {
    TORCH_CHECK_VALUE(holds, expected, " to hold ", name, ".", key,
                      ", got none. Load an archive that torch::save wrote.");
  };
  require(loaded.step().defined(), "step");
  std::size_t index = 0;
  const std::vector<at::ScalarType> dtypes =
      param.scalar_type() == at::kDouble
          ? std::vector<at::ScalarType>{at::kDouble}
          : std::vector<at::ScalarType>{at::kFloat, at::kBFloat16, at::kHalf};
  Traits::states(loaded, [&](const char* key, torch::Tensor& tensor) {
    // As in torch, the next step creates a missing momentum buffer.
    require(tensor.defined() || kHasStart<Options> || !uses_state(options, index), key);
    tensor = is_tensor_state<Options, State>(index)
                 ? checked_number(tensor, param, where(key))
                 : checked_state(tensor, param, where(key), dtypes);
    ++index;
  });
  // The next step creates a missing master from the parameter.
  if (!options.master_weights()) {  // disabled after the last step
    loaded.master_param(at::Tensor());
    loaded.param_remainder(at::Tensor());
  }
  loaded.master_param(
      checked_state(loaded.master_param(), param, where("master_param"), {at::kFloat}));
  TORCH_CHECK_VALUE(!loaded.param_remainder().defined() || param.scalar_type() != at::kHalf,
                    expected, " to hold no ", name, ".param_remainder, got one for a ",
                    param.scalar_type(), " parameter. Only bf16 parameters have remainders.");
  loaded.param_remainder(
      checked_state(loaded.param_remainder(), param, where("param_remainder"), {at::kShort}));
  loaded.ema_param(checked_state(loaded.ema_param(), param, where("ema_param"),
                                 {param.scalar_type() == at::kDouble ? at::kDouble : at::kFloat}));
  loaded.step(checked_step(loaded.step(), where("step")));
  if constexpr (kHasStart<Options>) {
    torch::Tensor& start = loaded.momentum_start();
    if (start.defined()) start = checked_step(start, where("momentum_start")).to(param.device());
  }
  return std::make_unique<State>(std::move(loaded));
}

template <class Options, class State>
struct LoadedGroup {
  Options options;
  /// One entry per parameter; null if the parameter had no state.
  std::vector<std::unique_ptr<State>> states;
};

template <class Options, class State, class Archive>
LoadedGroup<Options, State> read_group(Archive& archive, const std::vector<torch::Tensor>& params,
                                       const std::string& name) {
  constexpr const char* kName = OptionsTraits<Options>::kName;
  LoadedGroup<Options, State> loaded;
  Archive options;
  read_nested(archive, kName, "options", options);
  read_options(options, loaded.options);
  loaded.options.check(name);
  check_storage(kName, name, loaded.options, params);
  const std::int64_t count = read_int(archive, kName, "param_count");
  TORCH_CHECK_VALUE(count == static_cast<std::int64_t>(params.size()), kName,
                    ": expected the archive's ", name, " to have ", params.size(),
                    " parameters, got ", count, ".");
  for (std::size_t i = 0; i < params.size(); ++i) {
    const std::string key = "state/" + std::to_string(i);
    c10::IValue value;
    loaded.states.emplace_back();
    if (!archive.try_read(key, value)) continue;
    Archive state;
    read_nested(archive, kName, key, state);
    loaded.states.back() = read_state<Options, State>(state, params[i], loaded.options,
                                                      name + ".state[" + std::to_string(i) + "]");
  }
  return loaded;
}

template <class Options>
std::string archive_format() {
  return "torchfuse.optim." + std::string(OptionsTraits<Options>::kName) + ".1";
}

template <class Options, class State>
void FusedOptimizerOf<Options, State>::save(torch::serialize::OutputArchive& archive) const {
  check_usable("save");
  archive.write("format", c10::IValue(archive_format<Options>()));
  archive.write("group_count", c10::IValue(static_cast<std::int64_t>(param_groups_.size())));
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    torch::serialize::OutputArchive group_archive(archive.compilation_unit());
    torch::serialize::OutputArchive options(archive.compilation_unit());
    param_groups_[group].options().serialize(options);
    group_archive.write("options", options);

    const std::vector<torch::Tensor>& params = param_groups_[group].params();
    group_archive.write("param_count", c10::IValue(static_cast<std::int64_t>(params.size())));
    for (std::size_t i = 0; i < params.size(); ++i) {
      const auto entry = state_.find(params[i].unsafeGetTensorImpl());
      if (entry == state_.end()) continue;
      torch::serialize::OutputArchive state(archive.compilation_unit());
      entry->second->serialize(state);
      group_archive.write("state/" + std::to_string(i), state);
    }
    archive.write("group/" + std::to_string(group), group_archive);
  }
}

template <class Options, class State>
template <class Archive>
std::function<void()> FusedOptimizerOf<Options, State>::prepare_load(Archive& archive) {
  check_usable("load");
  // Later steps write to the states, so states must not be inference tensors.
  const c10::InferenceMode no_inference(false);
  const at::NoGradGuard no_grad;
  const std::string format = read_string(archive, name(), "format");
  TORCH_CHECK_VALUE(format == archive_format<Options>(), name(),
                    ": expected the archive's format to be ", archive_format<Options>(), ", got ",
                    format, ".");
  const std::int64_t count = read_int(archive, name(), "group_count");
  TORCH_CHECK_VALUE(count == static_cast<std::int64_t>(param_groups_.size()), name(),
                    ": expected the archive to have ", param_groups_.size(),
                    " parameter groups, got ", count, ".");
  auto shared = std::make_shared<std::vector<LoadedGroup<Options, State>>>();
  auto& loaded = *shared;
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    Archive group_archive;
    read_nested(archive, name(), "group/" + std::to_string(group), group_archive);
    loaded.push_back(read_group<Options, State>(group_archive, param_groups_[group].params(),
                                                options_name(group)));
    check_wide_options(loaded.back().options, loaded.front().options, group);
  }

  return [this, shared] { replace_state(*shared); };
}

template <class Options, class State>
template <class Groups>
void FusedOptimizerOf<Options, State>::replace_state(Groups& loaded) {
  decltype(state_) states;
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    static_cast<Options&>(param_groups_[group].options()) = loaded[group].options;
    const std::vector<torch::Tensor>& params = param_groups_[group].params();
    for (std::size_t i = 0; i < params.size(); ++i) {
      if (loaded[group].states[i] == nullptr) continue;
      states[params[i].unsafeGetTensorImpl()] = std::move(loaded[group].states[i]);
    }
  }
  state_ = std::move(states);
  if (!loaded.empty()) {
    const auto load_option = [&](const char* key, auto& own, const auto& saved) {
      if constexpr (requires { own.has_value(); }) {
        const bool limits =
            key == std::string_view("max_grad_norm") || key == std::string_view("skip_norm_above");
        if (limits && own.has_value() && !saved.has_value()) {
          TORCH_WARN(name(), ": ", key, " is now disabled, as in the saved optimizer. To enable ",
                     key, " again, set it in defaults() and in every parameter group.");
        }
      }
      own = saved;
    };
    visit_wide_options(static_cast<Options&>(defaults()), loaded.front().options, load_option);
  }
  invalidate_plan();
}

template <class Options, class State>
void FusedOptimizerOf<Options, State>::load(torch::serialize::InputArchive& archive) {
  // prepare_load() makes all checks, so that the replacement cannot fail halfway.
  prepare_load(archive)();
}

}  // namespace torchfuse::optim
