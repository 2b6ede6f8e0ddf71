// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/csrc/autograd/python_variable.h>

namespace torchfuse::bindings {

/// Returns whether the object's type is Tensor or a subclass. Unlike THPVariable_Check, this never
/// runs Python code such as `__class__` or a metaclass, and is ten times as fast for subclasses.
inline bool is_tensor(PyObject* object) {
  return THPVariable_CheckExact(object) ||
         PyType_IsSubtype(Py_TYPE(object), reinterpret_cast<PyTypeObject*>(THPVariableClass)) != 0;
}

}  // namespace torchfuse::bindings
