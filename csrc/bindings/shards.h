// SPDX-License-Identifier: BSD-3-Clause
// DTensors: what of them lies in this process.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

namespace torchfuse::bindings {

/// The local tensor of `tensor`, or `tensor` itself if it is no DTensor. A local tensor that is
/// still on its way from other processes is waited for.
pybind11::object local_tensor(pybind11::handle tensor);

/// What says how a DTensor is placed: an object that every tensor placed by the same call shares.
/// Null for a tensor that is no DTensor.
pybind11::object placement_of(pybind11::handle dtensor);

/// Whether a tensor is a DTensor that is placed as placement_of() another one says. Comparing two
/// placements takes long: `same` is the last other object that said the same, null at first. torch
/// makes such objects anew and never changes them.
bool placed_like(pybind11::handle tensor, pybind11::handle placement, pybind11::object& same);

/// @throws c10::TypeError, c10::ValueError for a gradient that is not placed like its parameter.
/// The message begins with `where`, as "FusedAdam.step: expected grad of params[0] of group 0".
void check_placement(pybind11::handle param, pybind11::handle grad, const std::string& where);

}  // namespace torchfuse::bindings
