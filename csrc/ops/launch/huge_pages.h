// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

namespace torchfuse::ops {

// Note [Huge pages]
// The system provides a large tensor's memory anew every time. The first write faults once for
// every 4 KB, which takes as long as all the arithmetic of a pass. On systems that provide huge
// pages on request, the request costs nothing and leaves one fault in 512. (torch's allocator makes
// this request for all tensors with THP_MEM_ALLOC_ENABLE=1.)
void request_huge_pages(const at::Tensor& tensor);

}  // namespace torchfuse::ops
