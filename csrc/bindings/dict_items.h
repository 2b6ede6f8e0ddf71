// SPDX-License-Identifier: BSD-3-Clause
// Whether a dictionary of an optimizer still holds the very objects that a plan was made from.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <utility>
#include <vector>

namespace torchfuse::bindings {

namespace py = pybind11;

// Note [Identity of optimizer state]
// Users replace entries of `optimizer.state` (offloading, loading, freezing), and a stale native
// pointer would then update a tensor that nobody saves. So each step compares the dictionaries with
// the plan. A dictionary keeps its entries in insertion order, so walking it beside a recorded list
// finds every replaced, added and removed entry without hashing a key: about 5 ns an entry. The
// recorded objects are kept alive, or a new tensor could be given a dead one's address.
class DictItems {
 public:
  DictItems() = default;

  explicit DictItems(py::handle dict) {
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    Py_ssize_t position = 0;
    items_.reserve(static_cast<std::size_t>(PyDict_Size(dict.ptr())));
    while (PyDict_Next(dict.ptr(), &position, &key, &value) != 0) {
      items_.emplace_back(py::reinterpret_borrow<py::object>(key),
                          py::reinterpret_borrow<py::object>(value));
    }
  }

  /// Asks for the memory that match() will read, in two steps: the objects, then what they point
  /// to.
  void fetch_objects(PyObject* dict) const {
    __builtin_prefetch(dict);
    __builtin_prefetch(items_.data());
  }
  static void fetch_entries(PyObject* dict) {
    constexpr int kBytes = 192;  // header, index table and four entries
    const auto* keys =
        reinterpret_cast<const char*>(reinterpret_cast<PyDictObject*>(dict)->ma_keys);
    for (int line = 0; line < kBytes; line += 64) __builtin_prefetch(keys + line);
  }

  bool match(PyObject* dict) const {
    if (static_cast<std::size_t>(PyDict_Size(dict)) != items_.size()) return false;
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    Py_ssize_t position = 0;
    for (const auto& [expected_key, expected_value] : items_) {
      if (PyDict_Next(dict, &position, &key, &value) == 0) return false;
      if (key != expected_key.ptr() || value != expected_value.ptr()) return false;
    }
    return true;
  }

 private:
  std::vector<std::pair<py::object, py::object>> items_;
};

}  // namespace torchfuse::bindings
