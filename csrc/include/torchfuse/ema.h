// SPDX-License-Identifier: BSD-3-Clause
// Averages of parameters, as FusedStepOptions::ema keeps them, in the place of the parameters.
#pragma once

#include <ATen/core/Tensor.h>

#include <torchfuse/export.h>

namespace torchfuse {

/// Exchanges a parameter and its average, in place; a second call with the result of the first one
/// exchanges them back, bit for bit.
///
/// A 16-bit parameter cannot hold its fp32 average: it receives the average rounded to nearest, and
/// its own value is returned. The average stays as it is then.
///
/// @param param fp32, fp64, fp16 or bf16.
/// @param ema its average, fp64 for an fp64 parameter and fp32 otherwise, of the same sizes.
/// @param kept result of the call that put the average in; undefined: this call does.
/// @returns for a 16-bit parameter that receives its average, the former value; else undefined.
/// @throws c10::Error for other dtypes or sizes, also if the parameter's dtype has changed since,
///   and for tensors that cannot be written; nothing is changed.
TORCHFUSE_API at::Tensor swap_ema_(const at::Tensor& param, const at::Tensor& ema,
                                   const at::Tensor& kept = {});

}  // namespace torchfuse
