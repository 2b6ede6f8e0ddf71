// SPDX-License-Identifier: BSD-3-Clause
#include <torch/csrc/utils/pybind.h>

#include <torchfuse/amp/grad_scaler_core.h>
#include <torchfuse/device_copy.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"

namespace torchfuse::bindings {
namespace {

namespace py = pybind11;
using amp::GradScalerCore;
/// See Note [Without the GIL] in clip_grad.cpp.
using WithoutGil = py::call_guard<py::gil_scoped_release>;

}  // namespace

void bind_amp(py::module_& module) {
  module.def("to_device", &to_device, py::arg("tensor"), py::arg("device"), WithoutGil());
  py::class_<GradScalerCore>(module, "GradScalerCore",
                             "Device state of torchfuse.amp.GradScaler: scale, trackers and "
                             "found_inf flags as persistent tensors.")
      .def(py::init([](std::int64_t hysteresis, std::optional<double> min_scale,
                       std::optional<double> max_scale, bool dynamic,
                       std::optional<std::string> process_group, std::int64_t history_size) {
             amp::ScalerExtras extras;
             extras.hysteresis = hysteresis;
             extras.min_scale = min_scale;
             extras.max_scale = max_scale;
             extras.dynamic = dynamic;
             extras.process_group = std::move(process_group);
             extras.history_size = history_size;
             return GradScalerCore(std::move(extras));
           }),
           py::kw_only(), py::arg("hysteresis") = 1, py::arg("min_scale") = py::none(),
           py::arg("max_scale") = py::none(), py::arg("dynamic") = true,
           py::arg("process_group") = py::none(), py::arg("history_size") = 0)
      .def("initialize", &GradScalerCore::initialize, py::arg("device"), py::arg("scale"),
           py::arg("growth_tracker"))
      .def_property("scale", &GradScalerCore::scale,
                    [](GradScalerCore& core, const std::optional<at::Tensor>& tensor) {
                      core.set_scale(tensor.value_or(at::Tensor()));
                    })
      .def_property("growth_tracker", &GradScalerCore::growth_tracker,
                    [](GradScalerCore& core, const std::optional<at::Tensor>& tensor) {
                      core.set_growth_tracker(tensor.value_or(at::Tensor()));
                    })
      .def_property_readonly("step_counts", &GradScalerCore::step_counts)
      .def("counts", &GradScalerCore::counts)
      .def("set_counts", &GradScalerCore::set_counts, py::arg("counts"))
      .def("scale_history",
           [](const GradScalerCore& core) {
             std::vector<std::tuple<std::int64_t, double, bool>> rows;
             for (const auto& entry : core.scale_history()) {
               rows.emplace_back(entry.step, entry.scale, entry.skipped);
             }
             return rows;
           })
      .def("inv_scale", &GradScalerCore::inv_scale)
      .def("hysteresis_tracker", &GradScalerCore::hysteresis_tracker)
      .def("set_hysteresis_tracker", &GradScalerCore::set_hysteresis_tracker, py::arg("value"))
      .def("found_inf", &GradScalerCore::found_inf, py::arg("optimizer"), py::arg("device"))
      .def("unscale_", &GradScalerCore::unscale_, py::arg("optimizer"), py::arg("params"),
           py::arg("inv_scale"), py::arg("allow_fp16") = false, WithoutGil())
      .def("check", &GradScalerCore::check, py::arg("optimizer"), py::arg("params"), WithoutGil())
      .def("combine", &GradScalerCore::combine, py::arg("flags"), WithoutGil())
      .def(
          "update",
          [](GradScalerCore& core, const std::vector<at::Tensor>& flags, double growth_factor,
             double backoff_factor, std::int64_t growth_interval, bool adjust) {
            core.update(flags, {growth_factor, backoff_factor, growth_interval}, adjust);
          },
          py::arg("flags"), py::arg("growth_factor"), py::arg("backoff_factor"),
          py::arg("growth_interval"), py::arg("adjust") = true, WithoutGil());
}

}  // namespace torchfuse::bindings
