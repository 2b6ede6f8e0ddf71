// SPDX-License-Identifier: BSD-3-Clause
#include "bindings/shards.h"

#include <torch/csrc/autograd/python_variable.h>

#include <c10/util/Exception.h>

namespace torchfuse::bindings {

namespace py = pybind11;

namespace {

constexpr const char* kLocal = "_local_tensor";

/// Python finds an attribute several times as fast by an interned name. They live for ever.
struct Names {
  PyObject* local = PyUnicode_InternFromString(kLocal);
  PyObject* spec = PyUnicode_InternFromString("_spec");
  PyObject* mesh = PyUnicode_InternFromString("mesh");
  PyObject* placements = PyUnicode_InternFromString("placements");
};

const Names& names() {
  static const Names names;
  return names;
}

/// Null if there is no such attribute.
py::object attribute(py::handle object, PyObject* name) {
  PyObject* found = PyObject_GetAttr(object.ptr(), name);
  if (found == nullptr) {
    if (PyErr_ExceptionMatches(PyExc_AttributeError) == 0) throw py::error_already_set();
    PyErr_Clear();
  }
  return py::reinterpret_steal<py::object>(found);
}

bool same_attribute(py::handle a, py::handle b, PyObject* name) {
  const py::object of_a = attribute(a, name);
  const py::object of_b = attribute(b, name);
  return of_a && of_b && (of_a.is(of_b) || of_a.equal(of_b));
}

}  // namespace

py::object local_tensor(py::handle tensor) {
  py::object local;
  if (!THPVariable_CheckExact(tensor.ptr())) local = attribute(tensor, names().local);
  if (!local) return py::reinterpret_borrow<py::object>(tensor);
  // Nearly always; the look-up that fails would take longer than all the rest.
  if (THPVariable_CheckExact(local.ptr())) return local;
  return py::hasattr(local, "wait") ? local.attr("wait")() : local;
}

py::object placement_of(py::handle dtensor) { return attribute(dtensor, names().spec); }

bool placed_like(py::handle tensor, py::handle placement) {
  const py::object own = placement_of(tensor);
  if (own.is(placement)) return true;
  return own && same_attribute(own, placement, names().mesh) &&
         same_attribute(own, placement, names().placements);
}

void check_placement(py::handle param, py::handle grad, const std::string& where) {
  TORCH_CHECK_TYPE(py::hasattr(grad, kLocal), where, " to be a DTensor like its parameter, got ",
                   Py_TYPE(grad.ptr())->tp_name, ".");
  const bool same = grad.attr("placements").equal(param.attr("placements")) &&
                    grad.attr("device_mesh").equal(param.attr("device_mesh"));
  if (same) return;
  const auto text = [](py::handle tensor) {
    return py::str(tensor.attr("placements")).cast<std::string>();
  };
  TORCH_CHECK_VALUE(false, where, " to be placed like its parameter, ", text(param), ", got ",
                    text(grad), ". Redistribute it before the step.");
}

}  // namespace torchfuse::bindings
