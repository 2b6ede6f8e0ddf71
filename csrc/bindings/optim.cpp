// SPDX-License-Identifier: BSD-3-Clause
// Bindings of FusedStep and of the hyper-parameter tables.
#include "bindings/bindings.h"
#include "bindings/hyper_params.h"
#include "bindings/py_fused_step.h"

#include <c10/util/Exception.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <torchfuse/fused_step.h>

namespace torchfuse::bindings {

namespace {

/// Converts a bool, "unscaled" or "clipped".
WriteBackGrads write_back_choice(const py::object& value) {
  if (!py::isinstance<py::str>(value)) return py::cast<bool>(value);
  const auto name = py::cast<std::string>(value);
  TORCH_CHECK_VALUE(name == "unscaled" || name == "clipped",
                    "FusedStep.step: expected write_back_grads to be a bool, 'unscaled' or "
                    "'clipped', got '",
                    name, "'.");
  return name == "unscaled" ? WriteBackGrads::kUnscaled : WriteBackGrads::kClipped;
}

void bind_hyper_params(py::module_& module) {
  module.def(
      "hyper_params_of",
      [](const std::string& algorithm) {
        std::vector<std::tuple<std::string, bool, double, bool>> table;
        for (const HyperParamInfo& info : hyper_params_of(algorithm)) {
          table.emplace_back(info.name, info.is_flag, info.high, info.on_host);
        }
        return table;
      },
      py::arg("algorithm"));
  module.def(
      "check_hyper_params",
      [](const std::string& algorithm, const std::vector<std::string>& places,
         const py::sequence& values, const std::string& caller, std::size_t group,
         bool read_devices) {
        std::vector<HyperParam> read;
        HyperParamReader(algorithm, places).read(values, caller, group, read_devices, read);
      },
      py::arg("algorithm"), py::arg("places"), py::arg("values"), py::arg("caller"),
      py::arg("group"), py::arg("read_devices"));
  module.def("check_hyper_param", &check_hyper_param, py::arg("algorithm"), py::arg("name"),
             py::arg("value"), py::arg("expected"));
}

}  // namespace

void bind_optim(py::module_& module) {
  bind_hyper_params(module);
  py::class_<PyFusedStep>(module, "FusedStep", "The native step of one optimizer.")
      .def(py::init<const std::string&, const std::string&, const std::vector<std::string>&>(),
           py::arg("algorithm"), py::arg("caller") = "FusedStep.step",
           py::arg("places") = std::vector<std::string>())
      .def_property_readonly("state_names", &PyFusedStep::state_names)
      .def_property_readonly("tensor_state_names", &PyFusedStep::tensor_state_names)
      .def_property_readonly("planned", &PyFusedStep::planned)
      .def("plan", &PyFusedStep::plan, py::arg("param_lists"), py::arg("owner"),
           py::arg("stochastic") = std::vector<bool>(),
           py::arg("shard_groups") = std::vector<std::optional<std::vector<std::string>>>(),
           py::arg("numbers") = std::vector<std::array<std::int64_t, 3>>(),
           py::arg("exchanges") = std::vector<std::pair<std::string, std::int64_t>>())
      .def(
          "step",
          [](PyFusedStep& self, const py::list& param_lists, const py::dict& owner,
             const py::list& groups, const std::optional<at::Tensor>& grad_scale,
             const std::optional<at::Tensor>& found_inf, bool check_inside,
             std::optional<double> max_grad_norm, const py::object& skip_norm_above,
             const py::object& write_back_grads, std::int64_t seed,
             const std::optional<std::tuple<double, bool, std::int64_t>>& ema,
             bool update_from_the_end, bool found_inf_is_output,
             const std::vector<std::string>& norm_groups,
             const std::optional<c10::Device>& norm_device, std::vector<bool> clip_apart) {
            FusedStepOptions options;
            options.grad_scale = grad_scale;
            options.found_inf = found_inf;
            options.check_inside = check_inside;
            options.max_grad_norm = max_grad_norm;
            if (!skip_norm_above.is_none()) {
              options.skip_norm_above = number_or_tensor(
                  skip_norm_above, "FusedStep.step: expected skip_norm_above to be");
            }
            options.write_back_grads = write_back_choice(write_back_grads);
            options.seed = seed;
            if (ema) options.ema = std::make_from_tuple<EmaOptions>(*ema);
            options.update_from_the_end = update_from_the_end;
            options.found_inf_is_output = found_inf_is_output;
            options.norm_groups = norm_groups;
            options.clip_apart = std::move(clip_apart);
            options.norm_device = norm_device.value_or(c10::kCPU);
            return self.step(param_lists, owner, groups, options);
          },
          py::arg("param_lists"), py::arg("owner"), py::arg("groups"),
          py::arg("grad_scale") = py::none(), py::arg("found_inf") = py::none(),
          py::arg("check_inside") = false, py::arg("max_grad_norm") = py::none(),
          py::arg("skip_norm_above") = py::none(), py::arg("write_back_grads") = false,
          py::arg("seed") = 0, py::arg("ema") = py::none(), py::arg("update_from_the_end") = false,
          py::arg("found_inf_is_output") = false,
          py::arg("norm_groups") = std::vector<std::string>(), py::arg("norm_device") = py::none(),
          py::arg("clip_apart") = std::vector<bool>())
      .def("total_norm", &PyFusedStep::total_norm)
      .def("skipped", &PyFusedStep::skipped);
}

}  // namespace torchfuse::bindings
