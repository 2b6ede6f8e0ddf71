// SPDX-License-Identifier: BSD-3-Clause
// The quick check of the lists that apex's raw functions take, and the operators that they call on
// lists. What the check does not accept, Python looks at again, to name what is wrong.
//
// torch.ops would make a list of boxed values for each call, and lists again from that: as much
// work as the check. These calls go through the dispatcher too, without boxes.
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <vector>

#include <torchfuse/ops.h>

#include "bindings/bindings.h"

namespace torchfuse::bindings {
namespace {

namespace py = pybind11;

/// Whether sizes and strides can be asked for.
bool has_strides(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided &&
         !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

bool is_dense(const at::Tensor& tensor) {
  return tensor.is_contiguous() || tensor.is_contiguous(at::MemoryFormat::ChannelsLast) ||
         tensor.is_contiguous(at::MemoryFormat::ChannelsLast3d);
}

bool is_supported(at::ScalarType type) {
  return type == at::kFloat || type == at::kHalf || type == at::kBFloat16 || type == at::kDouble;
}

const at::Tensor& tensor_at(const py::list& list, std::size_t i) {
  return THPVariable_Unpack(PyList_GET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i)));
}

/// Compares with the entry of the same index in the first list, which has been looked at before.
bool is_stored_as(const at::Tensor& tensor, const at::Tensor& beside) {
  return tensor.is_same(beside) ||
         (tensor.device() == beside.device() && tensor.sizes() == beside.sizes() &&
          tensor.strides() == beside.strides());
}

bool lists_match(const std::vector<py::list>& lists) {
  for (const py::list& list : lists) {
    if (list.size() != lists[0].size()) return false;
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (!THPVariable_Check(PyList_GET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i)))) return false;
      const at::Tensor& tensor = tensor_at(list, i);
      const at::Tensor& first = tensor_at(list, 0);
      if (tensor.scalar_type() != first.scalar_type() || tensor.device() != first.device() ||
          !is_supported(tensor.scalar_type()) || !has_strides(tensor)) {
        return false;
      }
      const bool is_first_list = &list == &lists[0];
      if (is_first_list ? !is_dense(tensor) : !is_stored_as(tensor, tensor_at(lists[0], i))) {
        return false;
      }
    }
  }
  return true;
}

}  // namespace

void bind_tensor_lists(py::module_& module) {
  module.def("lists_match", &lists_match, py::arg("lists"));
  module.def(
      "multi_tensor_l2_norm",
      [](const std::vector<at::Tensor>& tensors) { return multi_tensor_l2_norm(tensors); },
      py::arg("tensors"), py::call_guard<py::gil_scoped_release>());
  module.def(
      "multi_tensor_unscale_",
      [](const std::vector<at::Tensor>& tensors, const at::Tensor& found_inf,
         const at::Tensor& inv_scale) { multi_tensor_unscale_(tensors, found_inf, inv_scale); },
      py::arg("tensors"), py::arg("found_inf"), py::arg("inv_scale"),
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace torchfuse::bindings
