// SPDX-License-Identifier: BSD-3-Clause
// Reads local shards and placements from DTensors.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

namespace torchfuse::bindings {

/// Returns a DTensor's local tensor, or `tensor` itself if `tensor` is not a DTensor. Waits for a
/// local tensor whose collective is still pending.
pybind11::object local_tensor(pybind11::handle tensor);

/// Returns the object that describes a DTensor's placement, or null for other tensors. DTensors
/// created by the same call share the object.
pybind11::object placement_of(pybind11::handle dtensor);

/// Returns whether a tensor is a DTensor with the given placement_of(). Comparing placements is
/// slow, so `same` caches the last object that compared equal. Pass null at first. Caching is safe
/// because torch never modifies these objects.
bool placed_like(pybind11::handle tensor, pybind11::handle placement, pybind11::object& same);

/// Throws c10::TypeError or c10::ValueError if a gradient's placement differs from the parameter's.
/// Messages begin with `where`, such as "FusedAdam.step: expected grad of params[0] of group 0".
void check_placement(pybind11::handle param, pybind11::handle grad, const std::string& where);

}  // namespace torchfuse::bindings
