// SPDX-License-Identifier: BSD-3-Clause
// Swaps parameters with their moving averages, which FusedStepOptions::ema maintains.
#pragma once

#include <ATen/core/Tensor.h>

#include <torchfuse/export.h>

namespace torchfuse {

/// Swaps a parameter and an average, in place. A second call with the first call's result restores
/// both, bit for bit.
///
/// A 16-bit parameter cannot store an fp32 average. The parameter is set to the average rounded to
/// nearest, the old value is returned, and the average does not change.
///
///     const torch::Tensor kept = torchfuse::swap_ema_(param, ema);  // evaluate with the average
///     torchfuse::swap_ema_(param, ema, kept);                       // train on
///
/// @param param fp32, fp64, fp16 or bf16.
/// @param ema the parameter's average: fp64 for an fp64 parameter and fp32 otherwise, with equal
///   sizes.
/// @param kept return value of the call that swapped the average in; undefined (default) in that
///   call.
/// @returns for a 16-bit parameter that is set to the average, the old value; otherwise undefined.
/// @throws c10::Error for other dtypes or sizes, for a parameter dtype that changed since the first
///   call, and for tensors that cannot be written; nothing is changed.
TORCHFUSE_API at::Tensor swap_ema_(const at::Tensor& param, const at::Tensor& ema,
                                   const at::Tensor& kept = {});

}  // namespace torchfuse
