// SPDX-License-Identifier: BSD-3-Clause
// The keys of a parameter's state dictionary, and what each entry is for a step.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace torchfuse::bindings {

namespace py = pybind11;

/// What an entry of a state dictionary is for the step. kNone: of no use for as long as it is None.
enum class EntryRole : std::uint8_t { kOther, kNone, kState, kMaster, kEma, kStep, kStart };

// Note [State dictionaries are read in order]
// Users replace entries of `optimizer.state` (offloading, loading, freezing), so each step reads
// them again. A dictionary keeps its entries in insertion order: walking it beside the recorded
// keys finds every entry without hashing, and notices added and removed ones. Nearly all parameters
// of an optimizer have the same keys, which are therefore recorded once.
class StateKeys {
 public:
  /// `names` are the algorithm's states; entries of other names do not matter.
  StateKeys(PyObject* dict, const std::vector<std::string>& names);

  /// Whether the dictionary has these keys in this order, and None where it had None.
  bool match(PyObject* dict) const;

  /// Calls visit(role, index of the state, value) for the tensors that a step needs. False: the
  /// dictionary has other keys, or something else than a tensor in a place of one.
  template <class Visit>
  bool visit(PyObject* dict, const Visit& visit) const;

 private:
  struct Key {
    py::object name;  ///< a copy; null for a key that is no text
    EntryRole role;
    std::uint8_t state;  ///< index of the state
  };

  static bool same(PyObject* key, const Key& expected) {
    if (key == expected.name.ptr()) return true;
    const bool text = PyUnicode_Check(key) != 0;
    if (!text || !expected.name) return text == static_cast<bool>(expected.name);
    return PyUnicode_Compare(key, expected.name.ptr()) == 0;
  }

  std::vector<Key> keys_;
};

template <class Visit>
bool StateKeys::visit(PyObject* dict, const Visit& visit) const {
  if (static_cast<std::size_t>(PyDict_Size(dict)) != keys_.size()) return false;
  PyObject* name = nullptr;
  PyObject* value = nullptr;
  Py_ssize_t position = 0;
  for (const Key& key : keys_) {
    if (PyDict_Next(dict, &position, &name, &value) == 0 || !same(name, key)) return false;
    if (key.role == EntryRole::kOther) continue;
    if (key.role == EntryRole::kNone) {
      if (value != Py_None) return false;
      continue;
    }
    if (!visit(key.role, key.state, value)) return false;
  }
  return true;
}

}  // namespace torchfuse::bindings
