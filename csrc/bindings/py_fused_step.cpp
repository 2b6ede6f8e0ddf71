// SPDX-License-Identifier: BSD-3-Clause
// Plans an optimizer's step, and looks the planned tensors up in every step.
#include "bindings/py_fused_step.h"

#include "bindings/is_tensor.h"
#include "bindings/shards.h"

#include <torch/csrc/autograd/python_variable.h>

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <tuple>
#include <unordered_map>

namespace torchfuse::bindings {
namespace {

c10::TensorImpl* impl_of(PyObject* tensor) {
  return THPVariable_Unpack(tensor).unsafeGetTensorImpl();
}

/// Appends lists and tuples unchanged, other iterables as lists.
void fast_sequences(const py::list& param_lists, Sequences& result) {
  for (const py::handle params : param_lists) {
    PyObject* fast = PySequence_Fast(params.ptr(), "FusedStep: expected params to be a sequence");
    if (fast == nullptr) throw py::error_already_set();
    result.push_back(py::reinterpret_steal<py::object>(fast));
  }
}

}  // namespace

std::string PyFusedStep::place_name(std::size_t group, std::size_t position) const {
  return "params[" + std::to_string(position) + "] of group " + std::to_string(group);
}

at::Tensor PyFusedStep::tensor_in(PyObject* state, const std::string& key, const std::string& place,
                                  bool sharded) const {
  PyObject* value = PyDict_GetItemString(state, key.c_str());
  if (value == nullptr || value == Py_None) return {};
  TORCH_CHECK_TYPE(THPVariable_Check(value), caller_, ": expected ", key, " of ", place,
                   " to be a tensor, got ", Py_TYPE(value)->tp_name, ".");
  const py::object local = local_tensor(value);
  TORCH_CHECK_TYPE(sharded || local.ptr() == value, caller_, ": expected ", key, " of ", place,
                   " to be a plain tensor like its parameter, got ", Py_TYPE(value)->tp_name, ".");
  return THPVariable_Unpack(local.ptr());
}

FusedSlot PyFusedStep::slot(PyObject* param, PyObject* state, const std::string& place,
                            bool sharded) const {
  FusedSlot slot;
  slot.param = THPVariable_Unpack(
      (sharded ? local_tensor(param) : py::reinterpret_borrow<py::object>(param)).ptr());
  for (const std::string& name : native_.state_names()) {
    slot.states.push_back(tensor_in(state, name, place, sharded));
  }
  slot.master = tensor_in(state, "master_param", place, sharded);
  if (!slot.master.defined()) slot.master = tensor_in(state, "param_remainder", place, sharded);
  slot.ema = tensor_in(state, "ema_param", place, sharded);
  slot.step = tensor_in(state, "step", place, sharded);
  slot.start = tensor_in(state, "momentum_start", place, sharded);
  return slot;
}

void PyFusedStep::plan(const py::list& param_lists, const py::dict& owner,
                       const std::vector<bool>& stochastic,
                       const std::vector<std::optional<std::vector<std::string>>>& shard_groups,
                       const std::vector<std::array<std::int64_t, 3>>& numbers,
                       const std::vector<std::pair<std::string, std::int64_t>>& exchanges) {
  std::unordered_map<PyObject*, std::int64_t> place_of;
  for (const auto& [key, value] : owner) {
    place_of.emplace(key.ptr(), static_cast<std::int64_t>(place_of.size()));
  }
  Places places;
  places.num_states = place_of.size();
  std::vector<FusedSlot> slots;
  Sequences lists;
  fast_sequences(param_lists, lists);
  for (std::size_t group = 0; group < lists.size(); ++group) {
    const auto params = py::reinterpret_borrow<py::sequence>(lists[group]);
    places.group_sizes.push_back(static_cast<std::int64_t>(params.size()));
    for (std::size_t position = 0; position < params.size(); ++position) {
      const py::object param = params[position];
      const std::string place = place_name(group, position);
      TORCH_CHECK_TYPE(THPVariable_Check(param.ptr()), caller_, ": expected ", place,
                       " to be a tensor, got ", Py_TYPE(param.ptr())->tp_name, ".");
      const std::size_t index = places.entries.size();
      Entry& entry = places.entries.emplace_back();
      const auto found = place_of.find(param.ptr());
      if (found == place_of.end()) continue;
      const py::object state = owner[param];
      TORCH_CHECK_TYPE(PyDict_Check(state.ptr()) != 0, caller_, ": expected the state of ", place,
                       " to be a dict, got ", Py_TYPE(state.ptr())->tp_name, ".");
      if (PyDict_Size(state.ptr()) == 0) continue;
      entry.place = found->second;
      entry.keys = places.keys_of(state.ptr(), native_.state_names());
      const bool split = index < shard_groups.size() && shard_groups[index].has_value();
      if (split) entry.placement = placement_of(param);
      FusedSlot& made = slots.emplace_back(
          slot(param.ptr(), state.ptr(), place, static_cast<bool>(entry.placement)));
      made.group = static_cast<std::int64_t>(group);
      made.position = static_cast<std::int64_t>(position);
      made.index = static_cast<std::int64_t>(index);
      made.stochastic_rounding = group < stochastic.size() && stochastic[group];
      if (split) made.shard_groups = *shard_groups[index];
      if (index < numbers.size()) {
        made.numbers = {numbers[index][0], numbers[index][1], numbers[index][2]};
      }
      if (index < exchanges.size() && !exchanges[index].first.empty()) {
        std::tie(made.exchange_group, made.name_checksum) = exchanges[index];
        made.whole_sizes = py::cast<std::vector<std::int64_t>>(param.attr("shape"));
      }
    }
  }
  native_.plan(slots);
  places_ = std::move(places);
}

/// Prefetches objects of later parameters. With ten thousand parameters the caches lose all objects
/// between steps, and the step would wait for memory once per object.
void PyFusedStep::fetch_ahead(PyObject* const* items, std::int64_t left, std::size_t next) const {
  constexpr std::size_t kAhead = 24;
  if (left <= static_cast<std::int64_t>(kAhead)) return;
  __builtin_prefetch(items[kAhead]);
  const Entry& entry = places_.entries[next + kAhead];
  if (entry.place != Entry::kNoState) __builtin_prefetch(states_[entry.place].second);
}

/// Borrows parameters, states and gradients without running user code. Returns false if an object
/// does not match the plan. See Note [State dictionaries are read in order].
bool PyFusedStep::borrow(const Sequences& param_lists, PyObject* owner) {
  states_.clear();
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  Py_ssize_t position = 0;
  while (PyDict_Next(owner, &position, &key, &value) != 0) states_.emplace_back(key, value);
  if (states_.size() != places_.num_states || param_lists.size() != places_.group_sizes.size())
    return false;
  borrowed_.slots.reserve(places_.entries.size());
  std::size_t next = 0;
  for (std::size_t group = 0; group < param_lists.size(); ++group) {
    const std::int64_t size = PySequence_Fast_GET_SIZE(param_lists[group].ptr());
    if (size != places_.group_sizes[group]) return false;
    PyObject* const* items = PySequence_Fast_ITEMS(param_lists[group].ptr());
    for (std::int64_t i = 0; i < size; ++i, ++next) {
      fetch_ahead(items + i, size - i, next);
      if (!is_tensor(items[i])) return false;
      const Entry& entry = places_.entries[next];
      if (entry.place == Entry::kNoState) {
        if (impl_of(items[i])->grad().defined()) return false;
        continue;
      }
      const auto& [param, state] = states_[entry.place];
      if (param != items[i] || PyDict_Check(state) == 0) return false;
      if (!borrow_slot(next, param, state)) return false;
    }
  }
  return true;
}

bool PyFusedStep::borrow_slot(std::size_t index, PyObject* param, PyObject* state) {
  const Entry& entry = places_.entries[index];
  const bool sharded = static_cast<bool>(entry.placement);
  SlotTensors& slot = borrowed_.slots.emplace_back();
  slot.param = impl_of(borrowed_.hold(param));
  if (sharded) {
    borrowed_.sharded.push_back({&slot, param, index});
  } else if (const at::Tensor& grad = slot.param->grad(); grad.defined()) {
    borrowed_.grads.push_back(grad);
    slot.grad = grad.unsafeGetTensorImpl();
  }
  return places_.keys[entry.keys].visit(
      state, [&](EntryRole role, std::uint8_t k, PyObject* value) {
        if (!is_tensor(value)) return false;
        c10::TensorImpl*& place = role == EntryRole::kState    ? slot.states[k]
                                  : role == EntryRole::kMaster ? slot.master
                                  : role == EntryRole::kEma    ? slot.ema
                                  : role == EntryRole::kStart  ? slot.start
                                                               : slot.step;
        place = impl_of(borrowed_.hold(value));
        if (sharded) borrowed_.unwraps.push_back({&place, value});
        return true;
      });
}

/// Returns a name such as "grad of params[2] of group 0" for messages.
std::string PyFusedStep::grad_name(std::size_t index) const {
  std::size_t group = 0;
  while (index >= static_cast<std::size_t>(places_.group_sizes[group])) {
    index -= static_cast<std::size_t>(places_.group_sizes[group++]);
  }
  return "grad of " + place_name(group, index);
}

/// Replaces DTensors with local tensors. Returns false if a parameter's placement has changed.
bool PyFusedStep::unwrap_shards() {
  for (const auto& [slot, param, index] : borrowed_.sharded) {
    Entry& entry = places_.entries[index];
    if (!placement_of(param).is(entry.placement)) return false;
    slot->wrapper = slot->param;
    slot->param = impl_of(borrowed_.hold(local_tensor(param).ptr()));
    const at::Tensor& grad = slot->wrapper->grad();
    if (!grad.defined()) continue;
    const auto wrapper = py::reinterpret_steal<py::object>(THPVariable_Wrap(grad));
    if (!placed_like(wrapper, entry.placement, entry.grad_placement)) {
      check_placement(param, wrapper, caller_ + ": expected " + grad_name(index));
    }
    borrowed_.grad_wrappers.push_back(impl_of(borrowed_.hold(wrapper.ptr())));
    slot->grad = impl_of(borrowed_.hold(local_tensor(wrapper).ptr()));
  }
  for (const auto& [place, tensor] : borrowed_.unwraps) {
    *place = impl_of(borrowed_.hold(local_tensor(tensor).ptr()));
  }
  return true;
}

void PyFusedStep::take_hyper_params(const py::list& groups) {
  hyper_params_.resize(groups.size());
  for (std::size_t group = 0; group < groups.size(); ++group) {
    const py::handle values = PyList_GET_ITEM(groups.ptr(), group);
    reader_.read(values, caller_, group, /*read_devices=*/false, hyper_params_[group]);
  }
}

/// Releases all objects that a step borrowed.
void PyFusedStep::release() {
  borrowed_.clear();
  param_lists_.clear();
  for (std::vector<HyperParam>& values : hyper_params_) values.clear();
}

bool PyFusedStep::step(const py::list& param_lists, const py::dict& owner, const py::list& groups,
                       const FusedStepOptions& options) {
  if (!native_.planned()) return false;
  const auto releasing = c10::make_scope_exit([this] { release(); });
  take_hyper_params(groups);
  fast_sequences(param_lists, param_lists_);
  if (!borrow(param_lists_, owner.ptr()) || !unwrap_shards()) return false;
  bool done = false;
  {
    // The native step accesses no Python object.
    const py::gil_scoped_release released;
    done = native_.step(borrowed_.slots, hyper_params_, options);
  }
  if (!done) return false;
  if (options.writes_grads()) {
    for (c10::TensorImpl* grad : borrowed_.grad_wrappers) grad->bump_version();
  }
  return true;
}

}  // namespace torchfuse::bindings
