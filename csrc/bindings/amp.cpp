// SPDX-License-Identifier: BSD-3-Clause
#include <torch/csrc/utils/pybind.h>

#include <torchfuse/amp/grad_scaler_core.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "bindings/bindings.h"

namespace torchfuse::bindings {
namespace {

namespace py = pybind11;
using amp::GradScalerCore;

/// Python's None is an undefined tensor here; torch's caster does the other direction by itself.
at::Tensor tensor_or_undefined(const std::optional<at::Tensor>& tensor) {
  return tensor.value_or(at::Tensor());
}

}  // namespace

void bind_amp(py::module_& module) {
  py::class_<GradScalerCore>(module, "GradScalerCore",
                             "The device side of torchfuse.amp.GradScaler: scale, trackers and "
                             "found_inf slots as persistent tensors.")
      .def(py::init<std::int64_t>(), py::arg("hysteresis") = 1)
      .def("initialize", &GradScalerCore::initialize, py::arg("device"), py::arg("scale"),
           py::arg("growth_tracker"))
      .def_property("scale", &GradScalerCore::scale,
                    [](GradScalerCore& core, const std::optional<at::Tensor>& tensor) {
                      core.set_scale(tensor_or_undefined(tensor));
                    })
      .def_property("growth_tracker", &GradScalerCore::growth_tracker,
                    [](GradScalerCore& core, const std::optional<at::Tensor>& tensor) {
                      core.set_growth_tracker(tensor_or_undefined(tensor));
                    })
      .def_property_readonly("hysteresis", &GradScalerCore::hysteresis)
      .def("hysteresis_tracker", &GradScalerCore::hysteresis_tracker)
      .def("set_hysteresis_tracker", &GradScalerCore::set_hysteresis_tracker, py::arg("value"))
      .def("clear_slot", &GradScalerCore::clear_slot, py::arg("optimizer"), py::arg("device"))
      .def("unscale_", &GradScalerCore::unscale_, py::arg("optimizer"), py::arg("params"),
           py::arg("inv_scale"), py::arg("allow_fp16") = false)
      .def("check", &GradScalerCore::check, py::arg("optimizer"), py::arg("params"))
      .def("combine", &GradScalerCore::combine, py::arg("slots"))
      .def(
          "update",
          [](GradScalerCore& core, const std::vector<at::Tensor>& slots, double growth_factor,
             double backoff_factor, std::int64_t growth_interval) {
            core.update(slots, {growth_factor, backoff_factor, growth_interval});
          },
          py::arg("slots"), py::arg("growth_factor"), py::arg("backoff_factor"),
          py::arg("growth_interval"));
}

}  // namespace torchfuse::bindings
