// SPDX-License-Identifier: BSD-3-Clause
// Functions that add bindings to the module. module.cpp calls all of them.
#pragma once

#include <pybind11/pybind11.h>

namespace torchfuse::bindings {

void bind_optim(pybind11::module_& module);
void bind_amp(pybind11::module_& module);
void bind_clip_grad(pybind11::module_& module);
void bind_collectives(pybind11::module_& module);
void bind_tensor_lists(pybind11::module_& module);

}  // namespace torchfuse::bindings
