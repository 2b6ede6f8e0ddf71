// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include "ops/bucket.h"

namespace torchfuse::ops {

/// Multiplies a bucket's gradients by `inv_scale` in place, and sets `found_inf` to 1 if an element
/// was not finite. `inv_scale` and `found_inf` are 1-element fp32 tensors on the bucket's device.
void unscale_bucket(const char* op, const Bucket& bucket, const c10::Device& device,
                    const at::Tensor& found_inf, const at::Tensor& inv_scale);

}  // namespace torchfuse::ops
