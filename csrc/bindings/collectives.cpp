// SPDX-License-Identifier: BSD-3-Clause
// Bindings of collectives, which need no torch.ops operator, and of describe_missing_ranks.
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <torchfuse/collectives.h>
#include <torchfuse/missing_ranks.h>

#include "bindings/bindings.h"

namespace torchfuse::bindings {

void bind_collectives(pybind11::module_& module) {
  module.def("all_reduce_", &all_reduce_, py::arg("tensor"), py::arg("reduction"),
             py::arg("groups"), py::arg("caller"), py::call_guard<py::gil_scoped_release>());
  module.def("check_same_in_all_ranks", &check_same_in_all_ranks, py::arg("names"),
             py::arg("values"), py::arg("device"), py::arg("group"), py::arg("caller"),
             py::call_guard<py::gil_scoped_release>());
  module.def(
      "describe_missing_ranks",
      [](const std::string& group) {
        return describe_missing_ranks(*c10d::resolve_process_group(group));
      },
      py::arg("group"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace torchfuse::bindings
