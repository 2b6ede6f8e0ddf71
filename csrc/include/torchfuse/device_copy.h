// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <torchfuse/export.h>

namespace torchfuse {

/// `tensor` on `device`: itself if it is there already, else a copy that may be read at once.
///
/// Towards CUDA the host does not wait: streams keep the order, and memory that is not pinned has
/// been read when the call returns. Towards the host it waits for the device, because nothing else
/// would make a reader on the host wait.
TORCHFUSE_API at::Tensor to_device(const at::Tensor& tensor, const at::Device& device);

}  // namespace torchfuse
