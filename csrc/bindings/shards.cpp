// SPDX-License-Identifier: BSD-3-Clause
#include "bindings/shards.h"

#include <torch/csrc/autograd/python_variable.h>

#include <c10/util/Exception.h>

namespace torchfuse::bindings {

namespace py = pybind11;

namespace {

constexpr const char* kLocal = "_local_tensor";

}  // namespace

py::object local_tensor(py::handle tensor) {
  if (THPVariable_CheckExact(tensor.ptr()) || !py::hasattr(tensor, kLocal)) {
    return py::reinterpret_borrow<py::object>(tensor);
  }
  py::object local = tensor.attr(kLocal);
  // Nearly always; the look-up that fails would take longer than all the rest.
  if (THPVariable_CheckExact(local.ptr())) return local;
  return py::hasattr(local, "wait") ? local.attr("wait")() : local;
}

py::object placement_of(py::handle dtensor) { return dtensor.attr("_spec"); }

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
