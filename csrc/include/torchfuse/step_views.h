// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include <torchfuse/export.h>

namespace torchfuse {

/// Stores step counts in one fp32 buffer per device.
///
/// A count that already is an element of such a buffer keeps its memory, so that captured graphs
/// stay valid when parameters are added.
/// @param params parameters; only their devices are used.
/// @param steps one-element step counts, as many as `params`; an undefined count starts at 0.
/// @return 0-dim views of separate buffer elements with the values of `steps`, on the device of
///   `params[i]`.
/// @throws c10::Error for lists with unequal lengths, and for a count that does not contain one
///   element.
TORCHFUSE_API std::vector<at::Tensor> step_views(const std::vector<at::Tensor>& params,
                                                 std::vector<at::Tensor> steps);

}  // namespace torchfuse
