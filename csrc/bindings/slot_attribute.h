// SPDX-License-Identifier: BSD-3-Clause
// An attribute that a class declares in __slots__, as DTensor does with what a step reads.
#pragma once

#include <pybind11/pybind11.h>

#include <structmember.h>

namespace torchfuse::bindings {

// Note [Attributes in slots]
// Such an attribute lies at a place in the object that its class fixes, and Python's look-up by
// name ends there after several hundred instructions. The place is kept for the class that was read
// last, with the version that Python gives to each state of a class: it changes with the class and
// with its bases, and no two classes have the same. Whatever is no slot is looked up.
class SlotAttribute {
 public:
  /// Python finds an attribute several times as fast by an interned name. It lives for ever.
  explicit SlotAttribute(const char* name) : name_(PyUnicode_InternFromString(name)) {}

  /// What the attribute of `object` is; null if there is none.
  pybind11::object of(pybind11::handle object) {
    PyTypeObject* type = Py_TYPE(object.ptr());
    if (type->tp_version_tag != version_ || type != type_) find(type);
    if (offset_ < 0) return look_up(object.ptr());
    const char* place = reinterpret_cast<const char*>(object.ptr()) + offset_;
    return pybind11::reinterpret_borrow<pybind11::object>(
        *reinterpret_cast<PyObject* const*>(place));
  }

 private:
  static constexpr Py_ssize_t kNoSlot = -1;

  void find(PyTypeObject* type) {
    offset_ = kNoSlot;
    const pybind11::object found = look_up(reinterpret_cast<PyObject*>(type));
    type_ = type;
    // The look-up has given the class a version, unless Python has run out of them.
    version_ = type->tp_version_tag;
    if (version_ == 0 || !found || type->tp_getattro != PyObject_GenericGetAttr) return;
    if (!Py_IS_TYPE(found.ptr(), &PyMemberDescr_Type)) return;
    const auto* slot = reinterpret_cast<PyMemberDescrObject*>(found.ptr());
    if (slot->d_member->type == T_OBJECT_EX && PyType_IsSubtype(type, slot->d_common.d_type) != 0) {
      offset_ = slot->d_member->offset;
    }
  }

  pybind11::object look_up(PyObject* object) const {
    PyObject* found = PyObject_GetAttr(object, name_);
    if (found == nullptr) {
      if (PyErr_ExceptionMatches(PyExc_AttributeError) == 0) throw pybind11::error_already_set();
      PyErr_Clear();
    }
    return pybind11::reinterpret_steal<pybind11::object>(found);
  }

  PyObject* name_;
  const PyTypeObject* type_ = nullptr;  ///< only compared: it may be gone
  unsigned int version_ = 0;
  Py_ssize_t offset_ = kNoSlot;
};

}  // namespace torchfuse::bindings
