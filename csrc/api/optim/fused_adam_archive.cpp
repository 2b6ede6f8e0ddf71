// SPDX-License-Identifier: BSD-3-Clause
// Saving and loading FusedAdam. A load checks everything it reads before it replaces anything.
#include <torchfuse/optim/fused_adam.h>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/serialize/archive.h>

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <utility>

#include "api/optim/archive.h"
#include "api/optim/fused_adam_common.h"

namespace torchfuse::optim {

using torch::optim::OptimizerParamGroup;

namespace {

constexpr const char* kName = kFusedAdamName;
constexpr const char* kFormat = "torchfuse.optim.FusedAdam.1";

/// A loaded state tensor in the parameter's layout and device, sharing nothing with the archive.
/// Undefined stays undefined.
torch::Tensor adopt(const torch::Tensor& loaded, const at::Tensor& param, const std::string& name,
                    std::initializer_list<at::ScalarType> dtypes) {
  if (!loaded.defined()) return {};
  TORCH_CHECK_VALUE(loaded.sizes() == param.sizes(), kName, ": expected the archive's ", name,
                    " to have the sizes ", param.sizes(), " of its parameter, got ", loaded.sizes(),
                    ".");
  bool known = false;
  for (const at::ScalarType dtype : dtypes) known = known || loaded.scalar_type() == dtype;
  TORCH_CHECK_VALUE(known, kName, ": expected the archive's ", name, " to have dtype ",
                    *dtypes.begin(), " for a ", param.scalar_type(), " parameter, got ",
                    loaded.scalar_type(), ".");
  torch::Tensor own = at::empty_like(param.detach(), param.options().dtype(loaded.scalar_type()),
                                     at::MemoryFormat::Preserve);
  own.copy_(loaded);
  return own;
}

torch::Tensor adopt_step(const torch::Tensor& loaded, const std::string& name) {
  TORCH_CHECK_VALUE(loaded.dim() == 0 && loaded.scalar_type() == at::kFloat, kName,
                    ": expected the archive's ", name, " to be a 0-dim Float tensor, got a ",
                    loaded.dim(), "-dim ", loaded.scalar_type(), " one.");
  const double count = loaded.item<double>();
  TORCH_CHECK_VALUE(std::isfinite(count) && count >= 0.0, kName, ": expected the archive's ", name,
                    " to be a finite number >= 0, got ", count, ".");
  return loaded.clone();
}

std::unique_ptr<FusedAdamParamState> read_state(torch::serialize::InputArchive& archive,
                                                const at::Tensor& param,
                                                const FusedAdamOptions& options,
                                                const std::string& name) {
  FusedAdamParamState loaded;
  loaded.serialize(archive);
  const auto require = [&name](bool holds, const char* key) {
    TORCH_CHECK_VALUE(holds, kName, ": expected the archive to hold ", name, ".", key,
                      ", got a state without it.");
  };
  require(loaded.step().defined(), "step");
  require(loaded.exp_avg().defined(), "exp_avg");
  require(loaded.exp_avg_sq().defined(), "exp_avg_sq");
  require(loaded.max_exp_avg_sq().defined() || !options.amsgrad(), "max_exp_avg_sq");
  require(loaded.master_param().defined() || !wants_master(param, options), "master_param");
  TORCH_CHECK_VALUE(!loaded.master_param().defined() || wants_master(param, options), kName,
                    ": expected the archive to hold no ", name, ".master_param, got one for a ",
                    param.scalar_type(), " parameter. Masters belong to 16-bit parameters.");

  const at::ScalarType dtype = loaded.exp_avg().scalar_type();
  auto state = std::make_unique<FusedAdamParamState>();
  state->step(adopt_step(loaded.step(), name + ".step"));
  state->exp_avg(adopt(loaded.exp_avg(), param, name + ".exp_avg",
                       {moment_dtype(param), param.scalar_type()}));
  state->exp_avg_sq(adopt(loaded.exp_avg_sq(), param, name + ".exp_avg_sq", {dtype}));
  state->max_exp_avg_sq(adopt(loaded.max_exp_avg_sq(), param, name + ".max_exp_avg_sq", {dtype}));
  state->master_param(adopt(loaded.master_param(), param, name + ".master_param", {at::kFloat}));
  return state;
}

struct LoadedGroup {
  FusedAdamOptions options;
  /// One entry per parameter; null where the parameter had no state.
  std::vector<std::unique_ptr<FusedAdamParamState>> states;
};

LoadedGroup read_group(torch::serialize::InputArchive& archive, const OptimizerParamGroup& group,
                       const std::string& name) {
  LoadedGroup loaded;
  torch::serialize::InputArchive options;
  read_nested(archive, kName, "options", options);
  loaded.options.serialize(options);
  loaded.options.check(name);

  const std::vector<torch::Tensor>& params = group.params();
  const std::int64_t count = read_int(archive, kName, "param_count");
  TORCH_CHECK_VALUE(count == static_cast<std::int64_t>(params.size()), kName,
                    ": expected the archive's ", name, " to have ", params.size(),
                    " parameters, got ", count, ".");
  for (std::size_t i = 0; i < params.size(); ++i) {
    const std::string key = "state/" + std::to_string(i);
    c10::IValue value;
    loaded.states.emplace_back();
    if (!archive.try_read(key, value)) continue;
    torch::serialize::InputArchive state;
    read_nested(archive, kName, key, state);
    loaded.states.back() =
        read_state(state, params[i], loaded.options, name + ".state[" + std::to_string(i) + "]");
  }
  return loaded;
}

}  // namespace

void FusedAdam::save(torch::serialize::OutputArchive& archive) const {
  archive.write("format", c10::IValue(kFormat));
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

void FusedAdam::load(torch::serialize::InputArchive& archive) {
  const at::NoGradGuard no_grad;
  const std::string format = read_string(archive, kName, "format");
  TORCH_CHECK_VALUE(format == kFormat, kName, ": expected the archive's format to be ", kFormat,
                    ", got ", format, ".");
  const std::int64_t count = read_int(archive, kName, "group_count");
  TORCH_CHECK_VALUE(count == static_cast<std::int64_t>(param_groups_.size()), kName,
                    ": expected the archive to have ", param_groups_.size(),
                    " parameter groups, got ", count, ".");
  std::vector<LoadedGroup> loaded;
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    torch::serialize::InputArchive group_archive;
    read_nested(archive, kName, "group/" + std::to_string(group), group_archive);
    loaded.push_back(read_group(group_archive, param_groups_[group], options_name(group)));
    check_wide_options(loaded.back().options, loaded.front().options, group);
  }

  // Everything is read and checked; from here on nothing is refused.
  decltype(state_) states;
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    static_cast<FusedAdamOptions&>(param_groups_[group].options()) = loaded[group].options;
    const std::vector<torch::Tensor>& params = param_groups_[group].params();
    for (std::size_t i = 0; i < params.size(); ++i) {
      if (loaded[group].states[i] == nullptr) continue;
      states[params[i].unsafeGetTensorImpl()] = std::move(loaded[group].states[i]);
    }
  }
  state_ = std::move(states);
  if (!loaded.empty()) {
    const FusedAdamOptions& wide = loaded.front().options;
    static_cast<FusedAdamOptions&>(defaults())
        .max_grad_norm(wide.max_grad_norm())
        .write_back_grads(wide.write_back_grads())
        .skip_non_finite(wide.skip_non_finite());
  }
  invalidate_plan();
}

}  // namespace torchfuse::optim
