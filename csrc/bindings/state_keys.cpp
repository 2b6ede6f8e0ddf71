// SPDX-License-Identifier: BSD-3-Clause
#include "bindings/state_keys.h"

#include <algorithm>

namespace torchfuse::bindings {

namespace {

bool is(PyObject* key, const char* name) {
  return PyUnicode_CompareWithASCIIString(key, name) == 0;
}

EntryRole role_of(PyObject* key, bool has_master) {
  if (is(key, "step")) return EntryRole::kStep;
  if (is(key, "momentum_start")) return EntryRole::kStart;
  if (is(key, "ema_param")) return EntryRole::kEma;
  if (is(key, "master_param")) return EntryRole::kMaster;
  // If a state contains both, the step uses the master and ignores the remainder.
  if (is(key, "param_remainder")) return has_master ? EntryRole::kOther : EntryRole::kMaster;
  return EntryRole::kOther;
}

}  // namespace

StateKeys::StateKeys(PyObject* dict, const std::vector<std::string>& names) {
  PyObject* master = PyDict_GetItemString(dict, "master_param");
  const bool has_master = master != nullptr && master != Py_None;
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  Py_ssize_t position = 0;
  while (PyDict_Next(dict, &position, &key, &value) != 0) {
    Key entry{py::object(), EntryRole::kOther, 0};
    if (PyUnicode_Check(key) != 0) {
      entry.name = py::reinterpret_steal<py::object>(PyUnicode_FromObject(key));
      const auto found = std::find_if(names.begin(), names.end(), [key](const std::string& name) {
        return is(key, name.c_str());
      });
      entry.state = static_cast<std::uint8_t>(found - names.begin());
      entry.role = found != names.end() ? EntryRole::kState : role_of(key, has_master);
      if (entry.role != EntryRole::kOther && value == Py_None) entry.role = EntryRole::kNone;
    }
    keys_.push_back(std::move(entry));
  }
}

bool StateKeys::match(PyObject* dict) const {
  return visit(dict, [](EntryRole, std::uint8_t, PyObject* value) { return value != Py_None; });
}

}  // namespace torchfuse::bindings
