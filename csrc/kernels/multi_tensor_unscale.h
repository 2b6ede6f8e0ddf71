// SPDX-License-Identifier: BSD-3-Clause
// In-place unscale of gradients with the non-finite check, in one read and write.
#pragma once

#include <cstdint>

#include "kernels/common/status.h"
#include "kernels/common/stream.h"
#include "kernels/common/tensor_table.h"
#include "kernels/cpu/isa.h"

namespace torchfuse::kernels {

struct UnscaleArgs {
  TensorTable tensors;               ///< only rows[i].grad and rows[i].numel are used
  const float* inv_scale = nullptr;  ///< on the tensors' device
  float* found_inf = nullptr;        ///< on the tensors' device; set to 1, never cleared
};

/// grad *= *inv_scale over the flattened elements [begin, end). Returns whether an element was not
/// finite before the multiplication. The caller sets found_inf after all ranges.
bool multi_tensor_unscale_cpu(CpuIsa isa, const UnscaleArgs& args, std::int64_t begin,
                              std::int64_t end);

Status multi_tensor_unscale_cuda(const UnscaleArgs& args, Stream stream);

}  // namespace torchfuse::kernels
