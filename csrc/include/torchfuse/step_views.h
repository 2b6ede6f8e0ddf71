// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include <torchfuse/export.h>

namespace torchfuse {

/// Stores step counts in one fp32 buffer per device.
///
/// Counts that already are in such a buffer stay there, so that captured graphs stay valid when
/// parameters are added.
/// @param params parameters; only their devices are used.
/// @param steps 1-element step counts, as many as parameters; an undefined count starts at 0.
/// @return 0-dim views into the buffers, without overlap, with the values in `steps` and on the
///   parameters' devices.
/// @throws c10::Error for lists with unequal lengths, and for counts with more or fewer elements.
TORCHFUSE_API std::vector<at::Tensor> step_views(const std::vector<at::Tensor>& params,
                                                 std::vector<at::Tensor> steps);

}  // namespace torchfuse
