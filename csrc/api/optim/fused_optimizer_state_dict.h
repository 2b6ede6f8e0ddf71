// SPDX-License-Identifier: BSD-3-Clause
// Converts a fused optimizer's state to and from the layout of Python's state_dict(). Loading
// converts to the archive layout, and so reuses the archive's checks.
#pragma once

#include "api/optim/fused_optimizer_archive.h"
#include "api/optim/state_archive.h"

namespace torchfuse::optim {

template <class Options>
StateDict dict_of_options(const Options& options) {
  StateDict dict = make_state_dict();
  const auto write = [&](const char* key, const auto& value) {
    dict.insert_or_assign(std::string(key), to_archive(value));
  };
  visit_all_options(options, write);
  return dict;
}

template <class Options, class State>
StateDict FusedOptimizerOf<Options, State>::state_dict() const {
  check_usable("state_dict");
  StateDict states = make_state_dict();
  c10::impl::GenericList groups(c10::AnyType::get());
  std::int64_t next = 0;
  for (const torch::optim::OptimizerParamGroup& group : param_groups_) {
    StateDict options = dict_of_options(static_cast<const Options&>(group.options()));
    to_python_bounds(options);
    c10::impl::GenericList indices(c10::AnyType::get());
    for (const torch::Tensor& param : group.params()) {
      indices.push_back(c10::IValue(next));
      const auto found = state_.find(param.unsafeGetTensorImpl());
      if (found != state_.end()) {
        StateDict state = make_state_dict();
        visit_tensors<Options>(static_cast<const State&>(*found->second),
                               [&](const char* key, const torch::Tensor& tensor) {
                                 if (tensor.defined())
                                   state.insert_or_assign(std::string(key), tensor.detach());
                               });
        states.insert_or_assign(next, state);
      }
      ++next;
    }
    options.insert_or_assign("params", indices);
    groups.push_back(options);
  }
  StateDict dict = make_state_dict();
  dict.insert_or_assign("state", states);
  dict.insert_or_assign("param_groups", groups);
  return dict;
}

/// Converts a parameter's state to archive values. `where` is "<class>: expected state[<index>]".
template <class Options, class State>
StateDict archived_state(const StateDict& saved, const at::Tensor& param,
                         const std::string& where) {
  StateDict state = make_state_dict();
  const State known;
  visit_tensors<Options>(known, [&](const char* key, const torch::Tensor&) {
    const auto found = saved.find(std::string(key));
    if (found == saved.end() || found->value().isNone()) return;
    c10::IValue value = found->value();
    if (std::string_view(key) == "step") {
      // torch stores step counts in tensors of any dtype or in numbers.
      if (value.isInt()) value = at::scalar_tensor(value.toInt(), at::kFloat);
      if (value.isDouble()) value = at::scalar_tensor(value.toDouble(), at::kFloat);
      if (value.isTensor()) value = value.toTensor().to(at::kCPU, at::kFloat);
    } else if (std::string_view(key) == "param_remainder") {
      // Python gathers remainders as int32, because backends do not support int16.
      const bool wide = value.isTensor() && value.toTensor().scalar_type() == at::kInt;
      if (wide) value = value.toTensor().to(at::kShort);
    } else if (value.isTensor() && value.toTensor().is_floating_point() &&
               std::string_view(key) != "master_param") {
      const at::Tensor tensor = value.toTensor();
      const bool wide = param.scalar_type() == at::kDouble;
      if (wide != (tensor.scalar_type() == at::kDouble)) {
        value = tensor.to(wide ? at::kDouble : at::kFloat);
      }
    }
    state.insert_or_assign(std::string(key), value);
  });
  for (const auto& entry : saved) {
    const bool is_known = entry.value().isNone() || state.contains(entry.key());
    TORCH_CHECK_VALUE(is_known, where, " to hold states of ", OptionsTraits<Options>::kName,
                      ", got ", entry.key(), ". Load a checkpoint into the class that saved it.");
  }
  return state;
}

/// Converts a parameter group to archive values.
template <class Options, class State>
StateDict archived_group(StateDict saved, const StateDict& states,
                         const std::vector<torch::Tensor>& params, const std::string& where) {
  from_python_bounds(saved);
  StateDict options = make_state_dict();
  for (const auto& standard : dict_of_options(Options())) {
    const auto found = saved.find(standard.key());
    if (found == saved.end()) continue;
    options.insert_or_assign(standard.key(), to_archived_option(found->value(), standard.value()));
  }
  const auto indices = saved.find("params");
  TORCH_CHECK_VALUE(indices != saved.end() && indices->value().isList(), where,
                    " to hold a list 'params', got none.");
  const auto list = indices->value().toList();
  StateDict group = make_state_dict();
  group.insert_or_assign("options", options);
  group.insert_or_assign("param_count", static_cast<std::int64_t>(list.size()));
  for (std::size_t i = 0; i < std::min(list.size(), params.size()); ++i) {
    const c10::IValue index = list.get(i);
    TORCH_CHECK_VALUE(index.isInt(), where, "['params'] to hold ints, got ", index.tagKind(), ".");
    const auto found = states.find(index);
    if (found == states.end()) continue;
    const std::string owner = std::string(OptionsTraits<Options>::kName) + ": expected state[" +
                              std::to_string(index.toInt()) + "]";
    TORCH_CHECK_VALUE(found->value().isGenericDict(), owner, " to be a dict, got ",
                      found->value().tagKind(), ".");
    const StateDict state = found->value().toGenericDict();
    if (state.empty()) continue;
    group.insert_or_assign("state/" + std::to_string(i),
                           archived_state<Options, State>(state, params[i], owner));
  }
  return group;
}

template <class Options, class State>
std::function<void()> FusedOptimizerOf<Options, State>::prepare_state_dict(
    const StateDict& state_dict) {
  const at::NoGradGuard no_grad;
  StateArchive source(state_dict);
  StateArchive states;
  read_nested(source, name(), "state", states);
  const auto groups =
      read_value(source, name(), "param_groups", "a list", &c10::IValue::isList).toList();
  StateArchive archive;
  archive.write("format", archive_format<Options>());
  archive.write("group_count", static_cast<std::int64_t>(groups.size()));
  for (std::size_t group = 0; group < std::min(groups.size(), param_groups_.size()); ++group) {
    const std::string where = std::string(name()) + ": expected " + options_name(group);
    const c10::IValue saved = groups.get(group);
    TORCH_CHECK_VALUE(saved.isGenericDict(), where, " to be a dict, got ", saved.tagKind(), ".");
    archive.write("group/" + std::to_string(group),
                  archived_group<Options, State>(saved.toGenericDict().copy(), states.dict(),
                                                 param_groups_[group].params(), where));
  }
  return prepare_load(archive);
}

}  // namespace torchfuse::optim
