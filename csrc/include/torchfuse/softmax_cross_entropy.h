// SPDX-License-Identifier: BSD-3-Clause
// Cross entropy ops (torch.ops.torchfuse.*) as C++ functions. ops.h includes this header.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

#include <torchfuse/export.h>

namespace torchfuse {

/// Row-wise softmax cross entropy with label smoothing (Szegedy et al. 2016), differentiable. With
/// a row's logits x, label y, s = smoothing and C classes:
///
///     loss = log(sum(exp(x))) - (1 - s) * x[y] - s * mean(x)
///
/// as torch's cross_entropy with reduction "none". The logits are read twice on the CPU and once on
/// CUDA. Neither a softmax nor an fp32 copy of 16-bit logits is stored. Sums are in fp32 up to a
/// few thousand classes and in fp64 beyond, and in fp64 for fp64 logits. Each row's largest logit
/// is subtracted first, so errors do not grow with the logits' magnitude.
///
///     const torch::Tensor losses = torchfuse::softmax_cross_entropy(logits, labels, 0.1);
///
/// @param logits [N, C] in fp32, fp16, bf16 or fp64. Copied if not contiguous.
/// @param labels [N] in int64, from 0 to C - 1. On CUDA, where the host does not read labels, an
///   invalid label gives NaN as loss and gradients.
/// @param smoothing target probability spread over all classes, in [0, 1] (default 0).
/// @param ignore_index label whose rows have loss and gradients 0. `nullopt` (default) means no
///   such label.
/// @param dtype dtype for the losses: the logits', or fp32 for 16-bit logits. `nullopt` (default)
///   means fp32 under autocast, otherwise the logits'.
/// @return losses [N].
/// @throws c10::Error naming the argument; on the CPU also for an invalid label, with the label's
///   value.
TORCHFUSE_API at::Tensor softmax_cross_entropy(
    const at::Tensor& logits, const at::Tensor& labels, double smoothing = 0.0,
    std::optional<std::int64_t> ignore_index = std::nullopt,
    std::optional<at::ScalarType> dtype = std::nullopt);

/// Forward pass for softmax_cross_entropy().
///
/// @param logits, labels, smoothing, ignore_index as in softmax_cross_entropy().
/// @param dtype dtype of the losses: the logits', or fp32 for 16-bit logits. `nullopt` (default)
///   means the logits'.
/// @return losses; each row's log(sum(exp(x))); and the rounding error of the latter, which matters
///   for large logits. Both are fp32, or fp64 for fp64; all [N].
/// @throws c10::Error as softmax_cross_entropy().
TORCHFUSE_API std::tuple<at::Tensor, at::Tensor, at::Tensor> softmax_cross_entropy_forward(
    const at::Tensor& logits, const at::Tensor& labels, double smoothing = 0.0,
    std::optional<std::int64_t> ignore_index = std::nullopt,
    std::optional<at::ScalarType> dtype = std::nullopt);

/// Backward pass for softmax_cross_entropy(). Reads the logits once and writes their gradient once.
///
/// @param grad_losses [N], in any of these dtypes.
/// @param logits, labels, smoothing, ignore_index as in softmax_cross_entropy().
/// @param log_sum_exp second return value of softmax_cross_entropy_forward().
/// @param rest third return value of softmax_cross_entropy_forward(). `nullopt` (default) means
///   zeros, which add relative gradient errors up to m / 2^24 for logits of magnitude m, or
///   m / 2^53 for fp64.
/// @return gradient for the logits, in the logits' dtype.
/// @throws c10::Error naming the argument.
TORCHFUSE_API at::Tensor softmax_cross_entropy_backward(
    const at::Tensor& grad_losses, const at::Tensor& logits, const at::Tensor& log_sum_exp,
    const at::Tensor& labels, double smoothing = 0.0,
    std::optional<std::int64_t> ignore_index = std::nullopt,
    const std::optional<at::Tensor>& rest = std::nullopt);

}  // namespace torchfuse
