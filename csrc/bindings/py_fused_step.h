// SPDX-License-Identifier: BSD-3-Clause
// FusedStep for Python: runs the native step on the tensors that the optimizer's lists and
// dictionaries contain when the step begins.
#pragma once

#include <pybind11/pybind11.h>

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torchfuse/fused_step.h>

#include "bindings/hyper_params.h"
#include "bindings/state_keys.h"

namespace torchfuse::bindings {

/// A planned parameter.
struct Entry {
  static constexpr std::int64_t kNoState = -1;

  std::int64_t place = kNoState;  ///< position of the parameter's state in optimizer.state
  std::size_t keys = 0;           ///< index of the state's keys in Places::keys
  py::object placement;           ///< a DTensor's placement_of(), else null
  py::object grad_placement;      ///< placement_of() for the last gradient that matched
};

/// The plan's positions and keys of parameters and states. Holds no reference to user objects.
struct Places {
  std::vector<Entry> entries;
  std::vector<std::int64_t> group_sizes;
  std::vector<StateKeys> keys;  ///< distinct sets of keys
  std::size_t num_states = 0;   ///< entries of optimizer.state

  std::size_t keys_of(PyObject* state, const std::vector<std::string>& names) {
    // Search backwards, because the most recent set is the most likely match.
    for (std::size_t i = keys.size(); i-- > 0;) {
      if (keys[i].match(state)) return i;
    }
    keys.emplace_back(state, names);
    return keys.size() - 1;
  }
};

using Sequences = std::vector<py::object>;

/// Objects and tensors that a step borrows from the optimizer and keeps alive. Must be filled and
/// cleared with the GIL held.
struct Borrowed {
  struct Unwrap {
    c10::TensorImpl** place;
    PyObject* tensor;
  };
  struct Sharded {
    SlotTensors* slot;
    PyObject* param;
    std::size_t entry;
  };

  std::vector<SlotTensors> slots;
  std::vector<PyObject*> objects;
  std::vector<at::Tensor> grads;
  std::vector<Unwrap> unwraps;  ///< sharded parameters' states, which may be DTensors
  std::vector<Sharded> sharded;
  std::vector<c10::TensorImpl*> grad_wrappers;

  PyObject* hold(PyObject* object) {
    Py_INCREF(object);
    objects.push_back(object);
    return object;
  }

  void clear() {
    slots.clear();
    grads.clear();
    unwraps.clear();
    sharded.clear();
    grad_wrappers.clear();
    for (PyObject* object : objects) Py_DECREF(object);
    objects.clear();
  }
};

class PyFusedStep {
 public:
  PyFusedStep(const std::string& algorithm, const std::string& caller,
              const std::vector<std::string>& places)
      : native_(algorithm, caller), caller_(caller), reader_(algorithm, places) {}

  const std::vector<std::string>& state_names() const { return native_.state_names(); }
  std::vector<std::string> tensor_state_names() const {
    const std::vector<std::string>& names = native_.state_names();
    return {names.end() - static_cast<std::ptrdiff_t>(native_.num_tensor_states()), names.end()};
  }

  void plan(const py::list& param_lists, const py::dict& owner, const std::vector<bool>& stochastic,
            const std::vector<std::optional<std::vector<std::string>>>& shard_groups,
            const std::vector<std::array<std::int64_t, 3>>& numbers,
            const std::vector<std::pair<std::string, std::int64_t>>& exchanges);
  bool step(const py::list& param_lists, const py::dict& owner, const py::list& groups,
            const FusedStepOptions& options);

  bool planned() const { return native_.planned(); }

  std::optional<at::Tensor> total_norm() const { return defined_or_none(native_.total_norm()); }
  std::optional<at::Tensor> skipped() const { return defined_or_none(native_.skipped()); }

 private:
  static std::optional<at::Tensor> defined_or_none(const at::Tensor& tensor) {
    return tensor.defined() ? std::make_optional(tensor) : std::nullopt;
  }

  std::string place_name(std::size_t group, std::size_t position) const;
  std::string grad_name(std::size_t index) const;
  at::Tensor tensor_in(PyObject* state, const std::string& key, const std::string& place,
                       bool sharded) const;
  FusedSlot slot(PyObject* param, PyObject* state, const std::string& place, bool sharded) const;

  bool borrow(const Sequences& param_lists, PyObject* owner);
  bool borrow_slot(std::size_t entry, PyObject* param, PyObject* state);
  bool unwrap_shards();
  void fetch_ahead(PyObject* const* items, std::int64_t left, std::size_t next) const;
  void take_hyper_params(const py::list& groups);
  void release();

  FusedStep native_;
  std::string caller_;
  HyperParamReader reader_;
  Places places_;

  // Members used only during a step. The capacity is kept for the next step.
  Borrowed borrowed_;
  Sequences param_lists_;
  std::vector<std::vector<HyperParam>> hyper_params_;    ///< by group
  std::vector<std::pair<PyObject*, PyObject*>> states_;  ///< entries of optimizer.state
};

}  // namespace torchfuse::bindings
