// SPDX-License-Identifier: BSD-3-Clause
// torchfuse._C.check_same_in_all_ranks, which no graph needs to hold.
#include <torch/csrc/utils/pybind.h>

#include <torchfuse/collectives.h>

#include "bindings/bindings.h"

namespace torchfuse::bindings {

void bind_collectives(pybind11::module_& module) {
  module.def("check_same_in_all_ranks", &check_same_in_all_ranks, py::arg("names"),
             py::arg("values"), py::arg("device"), py::arg("group"), py::arg("caller"),
             py::call_guard<py::gil_scoped_release>());
}

}  // namespace torchfuse::bindings
