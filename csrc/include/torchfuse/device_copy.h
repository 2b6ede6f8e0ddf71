// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <torchfuse/export.h>

namespace torchfuse {

/// Returns `tensor` itself if it is on `device`, else a copy there that can be read immediately.
///
/// For a copy to CUDA the host does not wait: streams keep the order, and memory that is not pinned
/// has been read when the call returns. For a copy to the CPU it does wait for the device, because
/// nothing else would make a reader of the copy wait.
TORCHFUSE_API at::Tensor to_device(const at::Tensor& tensor, const at::Device& device);

/// Returns whether a CUDA graph records what is enqueued on the current stream of `device`.
TORCHFUSE_API bool is_capturing(const at::Device& device);

}  // namespace torchfuse
