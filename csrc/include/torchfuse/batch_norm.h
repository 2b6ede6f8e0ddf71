// SPDX-License-Identifier: BSD-3-Clause
// The ops of batch normalization, torch.ops.torchfuse.*, as C++ functions; ops.h includes them.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <tuple>

#include <torchfuse/export.h>

namespace torchfuse {

/// First of two forward passes of batch normalization: returns the moments of each channel of one
/// rank's input, in one read.
///
/// @param input [N, C, ...] in fp32, fp16, bf16 or fp64. Read in place if the pixels of a channel
///   or the channels of a pixel are contiguous (contiguous, channels_last, [N, C], and slices of
///   them); otherwise copied, with a warning.
/// @return fp64 [4 C + 1]: sum, its last bits, sum of squares, its last bits, each [C], and the
///   elements per channel. Their sum over ranks gives the moments of the pooled batch, whose
///   variance is as exact as one rank's, even if the mean is 1e6 sigma. Zeros for an empty input.
/// @throws c10::Error for another dtype or fewer than two dimensions.
TORCHFUSE_API at::Tensor batch_norm_stats(const at::Tensor& input);

/// Second of two forward passes of batch normalization: y = (x - mean) / sqrt(var + eps) * weight +
/// bias, plus the residual, then ReLU.
///
/// @param input as in batch_norm_stats().
/// @param weight, bias [C], fp32, fp16, bf16 or fp64; 1 and 0 if absent.
/// @param packed sum over ranks of what batch_norm_stats() returned. None: the running statistics
///   replace it, and do not change.
/// @param running_mean, running_var [C]: updated to (1 - momentum) * running + momentum * observed,
///   with the unbiased variance, unless no rank has an element.
/// @param num_batches_tracked int64: incremented, unless no rank has an element.
/// @param residual of input's sizes and dtype, added before the ReLU.
/// @param momentum none: 1 / num_batches_tracked, the cumulative average.
/// @param eps added to the biased variance.
/// @param relu clamp the output at 0.
/// @return output, of input's dtype, dense in its layout; and `saved` for the backward passes: fp64
///   [2 C + 1], mean, 1 / sqrt(var + eps), elements per channel (0 with running statistics).
/// @throws c10::Error naming the argument, before anything is written.
TORCHFUSE_API std::tuple<at::Tensor, at::Tensor> batch_norm_elemt(
    const at::Tensor& input, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& packed,
    const std::optional<at::Tensor>& running_mean, const std::optional<at::Tensor>& running_var,
    const std::optional<at::Tensor>& num_batches_tracked, const std::optional<at::Tensor>& residual,
    std::optional<double> momentum, double eps, bool relu = false);

/// First of two backward passes of batch normalization: one read of gradient and input.
///
/// @param grad_output of input's sizes and dtype.
/// @param input, weight, bias, relu as given to batch_norm_elemt().
/// @param saved second value that batch_norm_elemt() returned.
/// @param output first value that batch_norm_elemt() returned, given if there were a residual and a
///   ReLU: the gradient passes where it is positive. None: the ReLU is recomputed from the input.
/// @return sums, fp64 [2 C], of dy and of dy * x_hat, to be added over ranks; gradients of weight
///   and bias, from this rank's elements alone; and with `output` the gradient of the ReLU's input,
///   which is the residual's (empty otherwise).
/// @throws c10::Error naming the argument.
TORCHFUSE_API std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> batch_norm_backward_reduce(
    const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& saved,
    const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& output, bool relu = false);

/// Second of two backward passes of batch normalization:
/// dx = weight / sqrt(var + eps) * (dy - sum(dy) / n - x_hat * sum(dy * x_hat) / n).
///
/// @param grad_output as in batch_norm_backward_reduce(); or the gradient of the ReLU's input that
///   it returned, with `relu` false.
/// @param input, saved, weight, bias as in batch_norm_backward_reduce().
/// @param sums first value that batch_norm_backward_reduce() returned, added over ranks.
/// @param relu apply the derivative of the ReLU, recomputed from the input.
/// @throws c10::Error naming the argument.
TORCHFUSE_API at::Tensor batch_norm_backward_elemt(const at::Tensor& grad_output,
                                                   const at::Tensor& input, const at::Tensor& saved,
                                                   const at::Tensor& sums,
                                                   const std::optional<at::Tensor>& weight,
                                                   const std::optional<at::Tensor>& bias,
                                                   bool relu = false);

/// Batch normalization over the batches of all ranks of a group (Ioffe and Szegedy 2015; the
/// moments of the pooled batch), differentiable twice: one all-reduce of 4 C + 1 doubles in forward
/// and one of 2 C in backward, whatever the number of ranks. Ranks may have batches of different
/// sizes, including empty ones. The gradients of weight and bias are those of this rank's outputs;
/// data-parallel training adds them.
///
/// @param input, weight, bias, running_mean, running_var, num_batches_tracked, residual, momentum,
///   eps, relu as in batch_norm_elemt().
/// @param packed reduced moments of an earlier call with the same input: the forward pass then
///   exchanges nothing and does not update the running statistics.
/// @param training false: the running statistics are used, if there are any.
/// @param group name of a process group, as in all_reduce_(); none: this rank's batch alone.
/// @param caller name of the caller in error messages.
/// @param deterministic as in all_reduce_sum_().
/// @return output, and the reduced moments (empty with running statistics).
/// @throws c10::Error naming `caller` and the argument, before anything is written;
///   and naming the ranks that are missing when an exchange fails.
TORCHFUSE_API std::tuple<at::Tensor, at::Tensor> sync_batch_norm(
    const at::Tensor& input, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& running_mean,
    const std::optional<at::Tensor>& running_var,
    const std::optional<at::Tensor>& num_batches_tracked, const std::optional<at::Tensor>& residual,
    const std::optional<at::Tensor>& packed, bool training, std::optional<double> momentum,
    double eps, bool relu = false, const std::optional<std::string>& group = std::nullopt,
    const std::string& caller = "sync_batch_norm", bool deterministic = false);

}  // namespace torchfuse
