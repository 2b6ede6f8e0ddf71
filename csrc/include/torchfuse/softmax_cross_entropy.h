// SPDX-License-Identifier: BSD-3-Clause
// The ops of cross entropy, torch.ops.torchfuse.*, as C++ functions; ops.h includes them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

#include <torchfuse/export.h>

namespace torchfuse {

/// Cross entropy of the softmax of each row, with label smoothing (Szegedy et al. 2016),
/// differentiable. With a row's logits x, its label y, s = smoothing and C classes:
///
///     loss = log(sum(exp(x))) - (1 - s) * x[y] - s * mean(x)
///
/// as torch's cross_entropy with reduction "none". The logits are read twice on the CPU and once on
/// CUDA; neither a softmax nor a copy of 16-bit logits in fp32 is stored. Sums are in fp32 over
/// some thousand classes and in fp64 beyond, and in fp64 for fp64. Logits enter as differences from
/// the largest of their row: errors do not grow with their size.
///
/// @param logits [N, C] in fp32, fp16, bf16 or fp64. Copied where it is not contiguous.
/// @param labels [N] in int64, from 0 to C - 1. On CUDA, where values are not read back, another
///   label gives a loss and gradients of NaN.
/// @param smoothing share of the target that is spread over all classes, in [0, 1].
/// @param ignore_index label of rows whose loss and gradients are 0. None: there is no such label.
/// @param dtype of the losses: the logits', or fp32 for 16-bit logits. None: fp32 under autocast,
///   else the logits'.
/// @return losses [N].
/// @throws c10::Error naming the argument; on the CPU also for a label out of range, naming it.
TORCHFUSE_API at::Tensor softmax_cross_entropy(
    const at::Tensor& logits, const at::Tensor& labels, double smoothing = 0.0,
    std::optional<std::int64_t> ignore_index = std::nullopt,
    std::optional<at::ScalarType> dtype = std::nullopt);

/// The forward pass of softmax_cross_entropy().
///
/// @param logits, labels, smoothing, ignore_index as in softmax_cross_entropy().
/// @param dtype of the losses: the logits', or fp32 for 16-bit logits. None: the logits'.
/// @return losses; log(sum(exp(x))) of each row; and what rounding took from the latter, which of
///   large logits may be more than rounding left. Both fp32, or fp64 for fp64; all [N].
/// @throws c10::Error as softmax_cross_entropy().
TORCHFUSE_API std::tuple<at::Tensor, at::Tensor, at::Tensor> softmax_cross_entropy_forward(
    const at::Tensor& logits, const at::Tensor& labels, double smoothing = 0.0,
    std::optional<std::int64_t> ignore_index = std::nullopt,
    std::optional<at::ScalarType> dtype = std::nullopt);

/// The backward pass of softmax_cross_entropy(): one read of the logits and one write.
///
/// @param grad_losses [N], of any of these dtypes.
/// @param logits, labels, smoothing, ignore_index as in softmax_cross_entropy().
/// @param log_sum_exp second value that softmax_cross_entropy_forward() returned.
/// @param rest third value. None: zeros, with which gradients of logits of size m have relative
///   errors of m * 2^-24 (m * 2^-53 for fp64).
/// @return gradient of the logits, in their dtype.
/// @throws c10::Error naming the argument.
TORCHFUSE_API at::Tensor softmax_cross_entropy_backward(
    const at::Tensor& grad_losses, const at::Tensor& logits, const at::Tensor& log_sum_exp,
    const at::Tensor& labels, double smoothing = 0.0,
    std::optional<std::int64_t> ignore_index = std::nullopt,
    const std::optional<at::Tensor>& rest = std::nullopt);

}  // namespace torchfuse
