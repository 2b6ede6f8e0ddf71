// SPDX-License-Identifier: BSD-3-Clause
// Bindings of get_total_norm, clip_with_norm_ and clip_value_. Lists contain None for parameters
// without a gradient.
//
// Note [Without the GIL]
// A function that may wait for other processes must release the GIL, because otherwise it could
// deadlock. A Gloo thread that frees a tensor with a Python object waits for the GIL while holding
// the lock under which the next collective is queued.
#include <torch/csrc/utils/pybind.h>

#include <optional>

#include <torchfuse/clip_grad.h>

#include "bindings/bindings.h"

namespace torchfuse::bindings {
namespace {

namespace py = pybind11;
using OptionalTensors = std::vector<std::optional<at::Tensor>>;

std::vector<at::Tensor> undefined_where_none(const OptionalTensors& tensors) {
  std::vector<at::Tensor> result;
  result.reserve(tensors.size());
  for (const auto& tensor : tensors) result.push_back(tensor.value_or(at::Tensor()));
  return result;
}

}  // namespace

void bind_clip_grad(py::module_& module) {
  module.def(
      "get_total_norm",
      [](const OptionalTensors& tensors, double norm_type,
         const std::vector<std::vector<std::string>>& shard_groups) {
        return get_total_norm(undefined_where_none(tensors), norm_type, shard_groups);
      },
      py::arg("tensors"), py::arg("norm_type"),
      py::arg("shard_groups") = std::vector<std::vector<std::string>>(),
      py::call_guard<py::gil_scoped_release>());
  module.def(
      "clip_with_norm_",
      [](const OptionalTensors& tensors, double max_norm, const at::Tensor& total_norm) {
        clip_with_norm_(undefined_where_none(tensors), max_norm, total_norm);
      },
      py::arg("tensors"), py::arg("max_norm"), py::arg("total_norm"),
      py::call_guard<py::gil_scoped_release>());
  module.def(
      "clip_value_",
      [](const OptionalTensors& tensors, double clip_value) {
        clip_value_(undefined_where_none(tensors), clip_value);
      },
      py::arg("tensors"), py::arg("clip_value"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace torchfuse::bindings
