// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <torchfuse/export.h>

namespace torchfuse {

/// Returns `tensor` itself if it is on `device`, otherwise a copy there that can be read
/// immediately.
///
/// For a copy to CUDA the host does not wait: streams keep the order, and unpinned memory has been
/// read when the call returns. For a copy to the CPU the host waits for the device, because nothing
/// else synchronizes a reader of the copy.
TORCHFUSE_API at::Tensor to_device(const at::Tensor& tensor, const at::Device& device);

/// Returns whether a CUDA graph is being captured on the current stream of `device`.
TORCHFUSE_API bool is_capturing(const at::Device& device);

}  // namespace torchfuse
