// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

namespace torchfuse::ops {

// Note [Huge pages]
// A large tensor is fresh memory of the system every time, and its first write takes a fault for
// each 4 KB: as long as all the arithmetic of a pass. Where the system hands out huge pages to
// those who ask, asking costs nothing and leaves one fault in 512. (torch's allocator does so for
// all tensors under THP_MEM_ALLOC_ENABLE=1.)
void ask_for_huge_pages(const at::Tensor& tensor);

}  // namespace torchfuse::ops
