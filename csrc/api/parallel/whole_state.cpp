// SPDX-License-Identifier: BSD-3-Clause
// Converts between state dicts of shards and unsharded state dicts.
#include <ATen/ATen.h>
#include <ATen/core/List.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include "api/parallel/shards.h"

namespace torchfuse::parallel {

namespace {

constexpr const char* kLoad = "torchfuse::parallel::ShardedOptimizer::load_state_dict: expected";

/// Returns the state keys of all parameters. Skips malformed groups.
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

/// Returns whether a state entry has one element per parameter element.
bool Shards::is_sharded(const c10::IValue& key, const c10::IValue& value) const {
  return key.isString() && class_.numbers.count(key.toStringRef()) == 0 && value.isTensor() &&
         value.toTensor().defined();
}

void Shards::compare_states(const StateDict& states) const {
  std::vector<std::string> lines;
  for (const auto& entry : states) {
    for (const auto& value : entry.value().toGenericDict()) {
      if (!is_sharded(value.key(), value.value())) continue;
      lines.push_back(c10::str("state ", value.key().toStringRef(), " ",
                               value.value().toTensor().scalar_type(), " of parameter ",
                               entry.key().toInt()));
    }
  }
  compare("the states", c10::Join("\n", lines), [&] { return lines; });
}

/// Returns a parameter's unsharded state on the CPU, with the parameter's layout. Ranks send shards
/// in turn, so that a device stores only one shard at a time.
at::Tensor Shards::gathered(std::size_t index, const at::Tensor& shard, bool keep) const {
  at::Tensor whole;
  if (keep) {
    whole = at::empty_like(params_[index], shard.options().device(at::kCPU).requires_grad(false));
  }
  for (std::int64_t rank = 0; rank < size(); ++rank) {
    const auto [begin, end] = partition_.range(index, rank);
    if (begin == end) continue;
    const bool own = rank == collectives_.rank();
    const at::Tensor sent = own ? shard.contiguous() : at::empty({end - begin}, shard.options());
    collectives_.broadcast(sent, "the gather of states", rank);
    if (keep) whole.as_strided({end - begin}, {1}, begin).copy_(sent);
  }
  return whole;
}

Shards::StateDict Shards::whole_state(const StateDict& of_shards, bool keep) const {
  const at::NoGradGuard no_grad;
  const StateDict states = of_shards.at("state").toGenericDict();
  compare_states(states);
  StateDict whole(states.keyType(), states.valueType());
  for (const auto& entry : states) {
    const auto index = static_cast<std::size_t>(entry.key().toInt());
    StateDict state = entry.value().toGenericDict().copy();
    for (const auto& value : state) {
      if (!value.value().isTensor()) continue;
      const at::Tensor held = value.value().toTensor();
      value.setValue(is_sharded(value.key(), value.value())
                         ? gathered(index, held, keep)
                         : held.to(at::kCPU, /*non_blocking=*/false, /*copy=*/true));
    }
    whole.insert_or_assign(entry.key(), state);
  }
  StateDict result = of_shards.copy();
  result.insert_or_assign("state", whole);
  return result;
}

Shards::StateDict Shards::own_state(const StateDict& whole) const {
  const at::NoGradGuard no_grad;
  const auto states = whole.find("state");
  const auto groups = whole.find("param_groups");
  const bool complete = states != whole.end() && states->value().isGenericDict() &&
                        groups != whole.end() && groups->value().isList();
  if (!complete) return whole;  // loading into the optimizer reports what is missing
  const std::vector<c10::IValue> keys = keys_of(groups->value());
  TORCH_CHECK_VALUE(keys.size() == params_.size(), kLoad, " the state of ", params_.size(),
                    " parameters, got the state of ", keys.size(),
                    ". Construct the optimizer for the model that was saved.");
  StateDict own_states = states->value().toGenericDict().copy();
  for (std::size_t index = 0; index < keys.size(); ++index) {
    if (!keys[index].isInt()) continue;
    const auto found = own_states.find(keys[index]);
    if (found == own_states.end() || !found->value().isGenericDict()) continue;
    StateDict own = found->value().toGenericDict().copy();
    for (const auto& entry : own) {
      if (!is_sharded(entry.key(), entry.value())) continue;
      const at::Tensor value = entry.value().toTensor();
      TORCH_CHECK_VALUE(value.sizes() == params_[index].sizes(), kLoad, " state[",
                        keys[index].toInt(), "]['", entry.key().toStringRef(),
                        "'] to have the sizes ", params_[index].sizes(), " of its parameter, got ",
                        value.sizes(), ".");
      entry.setValue(partition_.shard_of(index, laid_out_like(params_[index], value)).clone());
    }
    own_states.insert_or_assign(keys[index], own);
  }
  StateDict result = whole.copy();
  result.insert_or_assign("state", own_states);
  return result;
}

}  // namespace torchfuse::parallel
