// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include <torchfuse/export.h>

namespace torchfuse {

/// Stores each parameter's step count in an fp32 buffer of its device: returns 0-dim views of
/// separate elements with the values of `steps`, on the device of `params[i]`. A count that already
/// is such a view keeps its memory when parameters are added. Undefined entries start at 0.
TORCHFUSE_API std::vector<at::Tensor> step_views(const std::vector<at::Tensor>& params,
                                                 std::vector<at::Tensor> steps);

}  // namespace torchfuse
