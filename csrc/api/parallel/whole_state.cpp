// SPDX-License-Identifier: BSD-3-Clause
// State dicts of whole parameters from those of parts, and the way back.
#include <ATen/ATen.h>
#include <ATen/core/List.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "api/checkpoint/placed_tensor.h"
#include "api/checkpoint/values.h"
#include "api/parallel/agreement.h"
#include "api/parallel/shards.h"

namespace torchfuse::parallel {

namespace {

constexpr const char* kLoad = "torchfuse::parallel::ShardedOptimizer::load_state_dict: expected";

/// The keys of all parameters' states; empty where the dict is not as it should be.
std::vector<c10::IValue> keys_of(const c10::IValue& groups) {
  std::vector<c10::IValue> keys;
  for (const c10::IValue& group : groups.toList()) {
    if (!group.isGenericDict()) continue;
    const auto dict = group.toGenericDict();
    const auto params = dict.find("params");
    if (params == dict.end() || !params->value().isList()) continue;
    for (const c10::IValue& key : params->value().toList()) keys.push_back(key);
  }
  return keys;
}

}  // namespace

/// One state of all parameters of a flat tensor that have it in a dtype.
struct Shards::SplitState {
  std::string key;
  std::size_t flat;
  at::ScalarType dtype;
  std::vector<std::size_t> indices;
};

/// Whether an entry of a state has an element for each of its parameter's.
bool Shards::is_split(const c10::IValue& key, const c10::IValue& value) const {
  return key.isString() && class_.numbers.count(key.toStringRef()) == 0 && value.isTensor() &&
         value.toTensor().defined();
}

std::vector<Shards::SplitState> Shards::split_states(const StateDict& states) const {
  std::vector<SplitState> found;
  for (std::size_t index = 0; index < params_.size(); ++index) {
    const auto state = states.find(static_cast<std::int64_t>(index));
    if (state == states.end()) continue;
    for (const auto& entry : state->value().toGenericDict()) {
      if (!is_split(entry.key(), entry.value())) continue;
      const std::string& key = entry.key().toStringRef();
      const std::size_t flat = partition_.places()[index].flat;
      const at::ScalarType dtype = entry.value().toTensor().scalar_type();
      auto known = std::find_if(found.begin(), found.end(), [&](const SplitState& each) {
        return each.key == key && each.flat == flat && each.dtype == dtype;
      });
      if (known == found.end()) known = found.insert(found.end(), {key, flat, dtype, {}});
      known->indices.push_back(index);
    }
  }
  return found;
}

at::Tensor Shards::gathered(const StateDict& states, const SplitState& state) const {
  const FlatPlan& plan = partition_.flats()[state.flat];
  const at::TensorOptions options = plan.options.dtype(state.dtype);
  const at::Tensor part = at::zeros({plan.part}, options);
  for (const std::size_t index : state.indices) {
    const auto [begin, end] = partition_.own(index);
    if (begin == end) continue;
    const std::int64_t first =
        partition_.places()[index].begin + begin - partition_.first_of(state.flat);
    const StateDict held = states.at(static_cast<std::int64_t>(index)).toGenericDict();
    part.narrow(0, first, end - begin).copy_(held.at(state.key).toTensor());
  }
  const at::Tensor whole = at::empty({plan.numel}, options);
  if (plan.part > 0) collectives_.all_gather(whole, part, "the gather of states");
  return whole.cpu();
}

std::vector<Shards::SplitState> Shards::agreed_states(const StateDict& states) const {
  std::vector<SplitState> split = split_states(states);
  std::vector<std::string> names;
  for (const SplitState& state : split) {
    names.push_back(c10::str("state ", state.key, " ", state.dtype, " of parameters ",
                             c10::Join(", ", state.indices)));
  }
  compare("the states", c10::Join("\n", names), names);
  return split;
}

Shards::StateDict Shards::whole_state(const StateDict& of_parts) const {
  const at::NoGradGuard no_grad;
  const StateDict states = of_parts.at("state").toGenericDict();
  const std::vector<SplitState> split = agreed_states(states);
  StateDict whole(states.keyType(), states.valueType());
  for (const auto& entry : states) {
    StateDict state = entry.value().toGenericDict().copy();
    for (const auto& value : state) {
      if (!value.value().isTensor() || is_split(value.key(), value.value())) continue;
      value.setValue(value.value().toTensor().to(at::kCPU, /*non_blocking=*/false, /*copy=*/true));
    }
    whole.insert_or_assign(entry.key(), state);
  }
  for (const SplitState& state : split) {
    const at::Tensor flat = gathered(states, state);
    for (const std::size_t index : state.indices) {
      StateDict held = whole.at(static_cast<std::int64_t>(index)).toGenericDict();
      held.insert_or_assign(
          state.key,
          partition_.view_of(index, flat, params_[index]).clone(at::MemoryFormat::Preserve));
    }
  }
  StateDict result = of_parts.copy();
  result.insert_or_assign("state", whole);
  return result;
}

Shards::StateDict Shards::placed_state(const StateDict& of_parts, StateDict& own) const {
  const StateDict states = of_parts.at("state").toGenericDict();
  agreed_states(states);
  StateDict placed(states.keyType(), states.valueType());
  for (const auto& entry : states) {
    const auto index = static_cast<std::size_t>(entry.key().toInt());
    std::vector<checkpoint::PlacedTensor::Span> spans;
    for (std::int64_t rank = 0; rank < size(); ++rank) {
      const auto [begin, end] = partition_.own(index, rank);
      if (begin < end) spans.push_back({static_cast<std::size_t>(rank), begin, end});
    }
    StateDict state = entry.value().toGenericDict().copy();
    StateDict parts = checkpoint::make_dict();
    for (const auto& value : state) {
      if (!is_split(value.key(), value.value())) continue;
      const at::Tensor part = value.value().toTensor();
      if (part.numel() > 0) parts.insert_or_assign(value.key(), part);
      const checkpoint::PlacedTensor whole{part.scalar_type(), params_[index].sizes().vec(),
                                           params_[index].strides().vec(), spans};
      value.setValue(whole.to_dict());
    }
    placed.insert_or_assign(entry.key(), state);
    if (!parts.empty()) own.insert_or_assign(entry.key(), parts);
  }
  StateDict result = of_parts.copy();
  result.insert_or_assign("state", placed);
  return result;
}

Shards::StateDict Shards::own_state(const StateDict& whole, const ReadPart& read_part) const {
  const at::NoGradGuard no_grad;
  const auto states = whole.find("state");
  const auto groups = whole.find("param_groups");
  const bool complete = states != whole.end() && states->value().isGenericDict() &&
                        groups != whole.end() && groups->value().isList();
  if (!complete) return whole;  // the optimizer says what is missing
  const std::vector<c10::IValue> keys = keys_of(groups->value());
  TORCH_CHECK_VALUE(keys.size() == params_.size(), kLoad, " the state of ", params_.size(),
                    " parameters, got that of ", keys.size(),
                    ". Make the optimizer of the model that was saved.");
  StateDict split = states->value().toGenericDict().copy();
  for (std::size_t index = 0; index < keys.size(); ++index) {
    if (!keys[index].isInt()) continue;
    const auto found = split.find(keys[index]);
    if (found == split.end() || !found->value().isGenericDict()) continue;
    StateDict own = found->value().toGenericDict().copy();
    for (const auto& entry : own) {
      if (read_part && entry.value().isGenericDict()) {
        entry.setValue(read_part(index, keys[index], entry.key(), entry.value().toGenericDict()));
        continue;
      }
      if (!is_split(entry.key(), entry.value())) continue;
      const at::Tensor value = entry.value().toTensor();
      TORCH_CHECK_VALUE(value.sizes() == params_[index].sizes(), kLoad, " state[",
                        keys[index].toInt(), "]['", entry.key().toStringRef(),
                        "'] to have the sizes ", params_[index].sizes(), " of its parameter, got ",
                        value.sizes(), ".");
      entry.setValue(partition_.part_of(index, laid_out_like(params_[index], value)).clone());
    }
    split.insert_or_assign(keys[index], own);
  }
  StateDict result = whole.copy();
  result.insert_or_assign("state", split);
  return result;
}

}  // namespace torchfuse::parallel
