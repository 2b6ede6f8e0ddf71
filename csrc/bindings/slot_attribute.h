// SPDX-License-Identifier: BSD-3-Clause
// An attribute that a class declares in __slots__, as DTensor does with those that a step reads.
#pragma once

#include <pybind11/pybind11.h>

namespace torchfuse::bindings {

/// Reads one attribute of many objects of one class.
///
/// Python's lookup by name takes several hundred instructions. Here the lookup is done once for a
/// class. If it finds a data descriptor, which takes precedence over everything in the object, the
/// descriptor alone is called for each object. A descriptor that the class gets later is not seen.
class SlotAttribute {
 public:
  /// Python finds an attribute several times as fast by an interned name, which is never freed.
  explicit SlotAttribute(const char* name) : name_(PyUnicode_InternFromString(name)) {}

  /// Returns the attribute of `object`; null if there is none.
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
  pybind11::object type_;  ///< held, so that no other class gets its address
  pybind11::object descriptor_;
  descrgetfunc get_ = nullptr;
};

}  // namespace torchfuse::bindings
