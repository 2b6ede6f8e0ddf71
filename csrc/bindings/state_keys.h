// SPDX-License-Identifier: BSD-3-Clause
// The keys of a parameter's state dictionary, and the role of each entry in a step.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace torchfuse::bindings {

namespace py = pybind11;

/// Role of a state dictionary's entry in the step. kNone marks an entry that the step would use if
/// the value were not None.
enum class EntryRole : std::uint8_t { kOther, kNone, kState, kMaster, kEma, kStep, kStart };

// Note [State dictionaries are read in order]
// Users replace entries in `optimizer.state` (offloading, loading, freezing), so each step reads
// all entries again. A dictionary keeps insertion order. Walking the dictionary alongside the
// recorded keys finds every entry without hashing, and detects added and removed entries. Nearly
// all parameters have the same keys, so each distinct set of keys is recorded once.
class StateKeys {
 public:
  /// @param names the algorithm's state names. Keys without a role in the step are ignored.
  StateKeys(PyObject* dict, const std::vector<std::string>& names);

  /// Returns whether the dictionary has the recorded keys in order, with None at the same entries.
  bool match(PyObject* dict) const;

  /// Calls visit(role, state index, value) for the entries that a step needs. Returns false if the
  /// keys differ, if a None entry now has a value, or if `visit` returns false.
  template <class Visit>
  bool visit(PyObject* dict, const Visit& visit) const;

 private:
  struct Key {
    py::object name;  ///< copy of the key; null if the key is not a str
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
