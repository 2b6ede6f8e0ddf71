// SPDX-License-Identifier: BSD-3-Clause
// torchfuse._C.lists_match: the quick check of the lists that apex's raw functions take. What it
// does not accept, Python looks at again, to name what is wrong.
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <vector>

#include "bindings/bindings.h"

namespace torchfuse::bindings {
namespace {

namespace py = pybind11;

bool is_dense(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided) return false;
  if (tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return false;
  return tensor.is_contiguous() || tensor.is_contiguous(at::MemoryFormat::ChannelsLast) ||
         tensor.is_contiguous(at::MemoryFormat::ChannelsLast3d);
}

bool is_supported(at::ScalarType type) {
  return type == at::kFloat || type == at::kHalf || type == at::kBFloat16 || type == at::kDouble;
}

bool lists_match(const std::vector<py::list>& lists) {
  for (const py::list& list : lists) {
    if (list.size() != lists[0].size()) return false;
    for (std::size_t i = 0; i < list.size(); ++i) {
      PyObject* object = PyList_GET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i));
      if (!THPVariable_Check(object)) return false;
      const at::Tensor& tensor = THPVariable_Unpack(object);
      const at::Tensor& first = THPVariable_Unpack(PyList_GET_ITEM(list.ptr(), 0));
      // Of the first list, which has been looked at by now.
      const at::Tensor& beside =
          THPVariable_Unpack(PyList_GET_ITEM(lists[0].ptr(), static_cast<Py_ssize_t>(i)));
      if (!is_dense(tensor) || !is_supported(tensor.scalar_type()) ||
          tensor.scalar_type() != first.scalar_type() || tensor.device() != first.device() ||
          tensor.device() != beside.device() || tensor.sizes() != beside.sizes() ||
          tensor.strides() != beside.strides()) {
        return false;
      }
    }
  }
  return true;
}

}  // namespace

void bind_tensor_lists(py::module_& module) {
  module.def("lists_match", &lists_match, py::arg("lists"));
}

}  // namespace torchfuse::bindings
