// SPDX-License-Identifier: BSD-3-Clause
#include "bindings/shards.h"

#include "bindings/is_tensor.h"
#include "bindings/slot_attribute.h"

#include <torch/csrc/autograd/python_variable.h>

#include <c10/util/Exception.h>

#include <utility>

namespace torchfuse::bindings {

namespace py = pybind11;

namespace {

constexpr const char* kLocal = "_local_tensor";

struct Attributes {
  SlotAttribute local{kLocal};
  SlotAttribute spec{"_spec"};
  SlotAttribute mesh{"mesh"};
  SlotAttribute placements{"placements"};
};

/// Requires the GIL. Never destroyed, because Python may be finalized before static objects.
Attributes& attributes() {
  static auto* const attributes = new Attributes;
  return *attributes;
}

bool same_attribute(py::handle a, py::handle b, SlotAttribute& attribute) {
  const py::object of_a = attribute.of(a);
  const py::object of_b = attribute.of(b);
  return of_a && of_b && (of_a.is(of_b) || of_a.equal(of_b));
}

}  // namespace

py::object local_tensor(py::handle tensor) {
  py::object local;
  if (!THPVariable_CheckExact(tensor.ptr())) local = attributes().local.of(tensor);
  if (!local) return py::reinterpret_borrow<py::object>(tensor);
  // The usual case. A failing lookup of `wait` would take longer than the rest of the function.
  if (THPVariable_CheckExact(local.ptr())) return local;
  if (py::hasattr(local, "wait")) local = local.attr("wait")();
  TORCH_CHECK_TYPE(is_tensor(local.ptr()), "FusedStep: expected the local part of a ",
                   Py_TYPE(tensor.ptr())->tp_name, " to be a tensor, got ",
                   Py_TYPE(local.ptr())->tp_name, ".");
  return local;
}

py::object placement_of(py::handle dtensor) { return attributes().spec.of(dtensor); }

bool placed_like(py::handle tensor, py::handle placement, py::object& same) {
  py::object own = placement_of(tensor);
  if (own.is(placement) || (own && own.is(same))) return true;
  if (!own || !same_attribute(own, placement, attributes().mesh) ||
      !same_attribute(own, placement, attributes().placements)) {
    return false;
  }
  same = std::move(own);
  return true;
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
