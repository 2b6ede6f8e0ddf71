// SPDX-License-Identifier: BSD-3-Clause
// The module torchfuse._C: native functions that Python does not call through torch.ops.torchfuse.
// python/torchfuse/_C.pyi documents the module.
#include "bindings/bindings.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <c10/util/Exception.h>

#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <torchfuse/checkpoint.h>
#include <torchfuse/cpu_isa.h>
#include <torchfuse/ema.h>
#include <torchfuse/masters.h>
#include <torchfuse/step_views.h>

namespace torchfuse::bindings {
namespace {

// Translates c10::Error to torch's Python exceptions, such as torch.OutOfMemoryError, with the
// message but without the C++ backtrace in what().
void translate_torch_error(std::exception_ptr pending) {
  try {
    if (pending) std::rethrow_exception(pending);
  } catch (const c10::Error&) {
    torch::translate_exception_to_python(std::current_exception());
  }
}

// Passes None as an undefined tensor.
std::vector<at::Tensor> views_of_optional_steps(
    const std::vector<at::Tensor>& params, const std::vector<std::optional<at::Tensor>>& steps) {
  std::vector<at::Tensor> defined_steps;
  defined_steps.reserve(steps.size());
  for (const std::optional<at::Tensor>& step : steps) {
    defined_steps.push_back(step.value_or(at::Tensor()));
  }
  return step_views(params, std::move(defined_steps));
}

}  // namespace
}  // namespace torchfuse::bindings

PYBIND11_MODULE(_C, module) {
  namespace bindings = torchfuse::bindings;
  module.doc() = "Native part of torchfuse.";
  py::register_local_exception_translator(&bindings::translate_torch_error);

  module.def("cpu_isa", &torchfuse::cpu_isa,
             "Instruction level of the CPU kernels: 'baseline', 'avx2', 'avx512' or "
             "'avx512_bf16'; on aarch64 'baseline' or 'neon'.");
  module.def("set_cpu_isa", &torchfuse::set_cpu_isa, py::arg("name"),
             "Sets the instruction level of the CPU kernels for this process.");
  module.def(
      "swap_ema_",
      [](const at::Tensor& param, const at::Tensor& ema, const std::optional<at::Tensor>& kept) {
        const at::Tensor now = torchfuse::swap_ema_(param, ema, kept.value_or(at::Tensor()));
        return now.defined() ? std::make_optional(now) : std::nullopt;
      },
      py::arg("param"), py::arg("ema"), py::arg("kept") = py::none());
  module.def("remake_master", &torchfuse::remake_master, py::arg("param"), py::arg("master"));
  module.def("take_master", &torchfuse::take_master, py::arg("param"), py::arg("master"));
  module.def("master_of_remainder", &torchfuse::master_of_remainder, py::arg("param"),
             py::arg("remainder"));
  module.def("remainder_of_master", &torchfuse::remainder_of_master, py::arg("master"));
  module.def("step_views", &bindings::views_of_optional_steps, py::arg("params"), py::arg("steps"),
             "Returns step counts as 0-dim views into one buffer per device.");

  module.def(
      "check_pickle",
      [](const py::bytes& bytes, const std::string& where) {
        torchfuse::check_pickle(static_cast<std::string_view>(bytes), where);
      },
      py::arg("bytes"), py::arg("where"),
      "Raises ValueError unless a pickle contains only plain values and dense tensors.");

  bindings::bind_optim(module);
  bindings::bind_amp(module);
  bindings::bind_clip_grad(module);
  bindings::bind_collectives(module);
  bindings::bind_tensor_lists(module);
}
