// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include <torchfuse/export.h>

namespace torchfuse {

/// Gives each parameter's step count an element of one buffer per device: returns 0-dim views of
/// separate elements with the values of `steps`, on the device of `params[i]`. A count that is such
/// a view already stays where it is, whatever parameters join. Undefined entries start at 0.
TORCHFUSE_API std::vector<at::Tensor> step_views(const std::vector<at::Tensor>& params,
                                                 std::vector<at::Tensor> steps);

}  // namespace torchfuse
