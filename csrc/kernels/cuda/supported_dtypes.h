// SPDX-License-Identifier: BSD-3-Clause
// The dtype tuples that update kernels are built for. `ops` converts gradients of other dtypes
// first.
#pragma once

#include "kernels/common/dtype.h"

namespace torchfuse::kernels {

///   param      grad                     state            master
///   fp32       fp32, fp16, bf16         fp32             -
///   fp16       fp16, fp32               fp32             optional, fp32
///   fp16       fp16, fp32               fp16             -
///   bf16       bf16, fp32               fp32             optional, fp32
///   bf16       bf16, fp32               bf16             -
///   fp64       fp64                     fp64             -
constexpr bool cuda_supports(DType param, DType grad, DType state, bool has_master) {
  if (param == DType::kFloat64) {
    return grad == DType::kFloat64 && state == DType::kFloat64 && !has_master;
  }
  if (grad == DType::kFloat64 || state == DType::kFloat64) return false;
  if (param == DType::kFloat32) return state == DType::kFloat32 && !has_master;
  const bool grad_fits = grad == param || grad == DType::kFloat32;
  const bool state_fits = state == DType::kFloat32 || (state == param && !has_master);
  return grad_fits && state_fits;
}

}  // namespace torchfuse::kernels
