// SPDX-License-Identifier: BSD-3-Clause
// Reads attributes that a class declares in __slots__, such as DTensor's.
#pragma once

#include <pybind11/pybind11.h>

namespace torchfuse::bindings {

/// Reads one attribute from many objects with the same class.
///
/// Python's lookup by name takes several hundred instructions. SlotAttribute looks the name up once
/// per class. If the class has a data descriptor, which takes precedence over the object's
/// attributes, only the descriptor is called per object. Descriptors added later are not noticed.
class SlotAttribute {
 public:
  /// Interns the name, which makes Python's lookup several times faster. The name is never freed.
  explicit SlotAttribute(const char* name) : name_(PyUnicode_InternFromString(name)) {}

  /// Returns the object's attribute, or null if the object has none.
  pybind11::object of(pybind11::handle object) {
    PyTypeObject* type = Py_TYPE(object.ptr());
    if (reinterpret_cast<PyObject*>(type) != type_.ptr()) find(type);
    if (get_ == nullptr) return look_up(object.ptr());
    return or_null(get_(descriptor_.ptr(), object.ptr(), type_.ptr()));
  }

 private:
  void find(PyTypeObject* type) {
    type_ = pybind11::reinterpret_borrow<pybind11::object>(reinterpret_cast<PyObject*>(type));
    descriptor_ = look_up(type_.ptr());
    get_ = nullptr;
    if (!descriptor_ || type->tp_getattro != PyObject_GenericGetAttr) return;
    const PyTypeObject* kind = Py_TYPE(descriptor_.ptr());
    if (kind->tp_descr_set != nullptr) get_ = kind->tp_descr_get;
  }

  pybind11::object look_up(PyObject* object) const {
    return or_null(PyObject_GetAttr(object, name_));
  }

  static pybind11::object or_null(PyObject* found) {
    if (found == nullptr) {
      if (PyErr_ExceptionMatches(PyExc_AttributeError) == 0) throw pybind11::error_already_set();
      PyErr_Clear();
    }
    return pybind11::reinterpret_steal<pybind11::object>(found);
  }

  PyObject* name_;
  pybind11::object type_;  ///< owned, so that no other class can get the same address
  pybind11::object descriptor_;
  descrgetfunc get_ = nullptr;
};

}  // namespace torchfuse::bindings
