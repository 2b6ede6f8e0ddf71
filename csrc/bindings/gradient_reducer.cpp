// SPDX-License-Identifier: BSD-3-Clause
// torchfuse._C.GradientReducer, which Python's ShardedOptimizer is built on.
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <torchfuse/parallel/gradient_reducer.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"

namespace torchfuse::bindings {

namespace {

/// Deletes without the GIL: the group's threads, which may wait for it, are joined if this was the
/// last that held the group.
struct DeleteWithoutGil {
  void operator()(parallel::GradientReducer* reducer) const {
    const py::gil_scoped_release released;
    delete reducer;
  }
};

using Holder = std::unique_ptr<parallel::GradientReducer, DeleteWithoutGil>;

}  // namespace

/// Calls release the GIL: a hook that waits for it, to drop a gradient, may hold the reducer's
/// lock.
void bind_gradient_reducer(pybind11::module_& module) {
  using parallel::GradientReducer;
  using WithoutGil = py::call_guard<py::gil_scoped_release>;
  py::class_<GradientReducer, Holder>(module, "GradientReducer")
      .def(py::init([](std::vector<std::string> names, std::vector<at::Tensor> params,
                       std::vector<at::Tensor> parts,
                       const std::vector<std::vector<std::size_t>>& members,
                       const std::string& group, bool find_unused_parameters,
                       const std::string& who) {
             return Holder(new GradientReducer(
                 std::move(names), std::move(params), std::move(parts), members,
                 c10d::resolve_process_group(group), find_unused_parameters, who));
           }),
           py::kw_only(), py::arg("names"), py::arg("params"), py::arg("parts"), py::arg("members"),
           py::arg("group"), py::arg("find_unused_parameters"), py::arg("who"))
      .def_static("plan", &GradientReducer::plan, py::arg("params"), py::arg("first_bucket_bytes"),
                  py::arg("bucket_bytes"))
      .def("set_sync", &GradientReducer::set_sync, py::arg("sync"), WithoutGil())
      .def("check_ended", &GradientReducer::check_ended, WithoutGil());
}

}  // namespace torchfuse::bindings
