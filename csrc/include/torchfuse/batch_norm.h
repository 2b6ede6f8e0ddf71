// SPDX-License-Identifier: BSD-3-Clause
// Batch normalization ops (torch.ops.torchfuse.*) as C++ functions. ops.h includes this header.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <tuple>

#include <torchfuse/export.h>

namespace torchfuse {

/// First of two forward passes of batch normalization: returns each channel's moments over one
/// rank's input. Reads the input once.
///
/// @param input [N, C, ...] in fp32, fp16, bf16 or fp64. Read in place if each channel's pixels or
///   each pixel's channels are contiguous (contiguous, channels_last, [N, C], and slices of such
///   tensors); otherwise copied, with a warning.
/// @return fp64 [4 C + 1]: sum, its low-order bits, sum of squares, its low-order bits (each [C]),
///   and the element count per channel. Zeros for an empty input. Adding all ranks' tensors gives
///   the pooled batch's moments. The pooled variance is as exact as on one rank, even if the mean
///   is 1e6 sigma.
/// @throws c10::Error for another dtype or fewer than two dimensions.
TORCHFUSE_API at::Tensor batch_norm_stats(const at::Tensor& input);

/// Second of two forward passes of batch normalization: y = (x - mean) / sqrt(var + eps) * weight +
/// bias, plus the residual, then ReLU.
///
/// @param input as in batch_norm_stats().
/// @param weight, bias [C], fp32, fp16, bf16 or fp64; `nullopt` means 1 and 0.
/// @param packed sum over ranks of batch_norm_stats(). `nullopt` means to use the running
///   statistics, which then do not change.
/// @param running_mean, running_var [C]: updated to (1 - momentum) * running + momentum * observed,
///   with the unbiased variance, unless no rank has an element.
/// @param num_batches_tracked int64: incremented, unless no rank has an element.
/// @param residual same sizes and dtype as `input`; added before the ReLU.
/// @param momentum weight of the observed statistics; `nullopt` means 1 / num_batches_tracked, the
///   cumulative average.
/// @param eps added to the biased variance.
/// @param relu clamp the output at 0 (default false).
/// @return output, with the input's dtype, dense in the input's layout; and `saved` for the
///   backward passes: fp64 [2 C + 1], with mean, 1 / sqrt(var + eps), and elements per channel (0
///   with running statistics).
/// @throws c10::Error naming the argument, before anything is written.
TORCHFUSE_API std::tuple<at::Tensor, at::Tensor> batch_norm_elemt(
    const at::Tensor& input, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& packed,
    const std::optional<at::Tensor>& running_mean, const std::optional<at::Tensor>& running_var,
    const std::optional<at::Tensor>& num_batches_tracked, const std::optional<at::Tensor>& residual,
    std::optional<double> momentum, double eps, bool relu = false);

/// First of two backward passes of batch normalization. Reads gradient and input once.
///
/// @param grad_output same sizes and dtype as `input`.
/// @param input, weight, bias, relu as given to batch_norm_elemt().
/// @param saved second return value of batch_norm_elemt().
/// @param output first return value of batch_norm_elemt(), required if both a residual and a ReLU
///   were used: the gradient passes where `output` is positive. `nullopt` means to recompute the
///   ReLU from the input.
/// @return sums over dy and dy * x_hat, fp64 [2 C], to be added over ranks; gradients for weight
///   and bias, from this rank's elements only; and with `output` the ReLU's input gradient, which
///   is also the residual's gradient (empty otherwise).
/// @throws c10::Error naming the argument.
TORCHFUSE_API std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> batch_norm_backward_reduce(
    const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& saved,
    const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& output, bool relu = false);

/// Second of two backward passes of batch normalization:
///
///     dx = weight / sqrt(var + eps) * (dy - sum(dy) / n - x_hat * sum(dy * x_hat) / n)
///
/// @param grad_output as in batch_norm_backward_reduce(); or the ReLU's input gradient that
///   batch_norm_backward_reduce() returned, with `relu` false.
/// @param input, saved, weight, bias as in batch_norm_backward_reduce().
/// @param sums first return value of batch_norm_backward_reduce(), added over ranks.
/// @param relu apply the ReLU's derivative, recomputed from the input (default false).
/// @return input gradient, with the input's sizes and dtype.
/// @throws c10::Error naming the argument.
TORCHFUSE_API at::Tensor batch_norm_backward_elemt(const at::Tensor& grad_output,
                                                   const at::Tensor& input, const at::Tensor& saved,
                                                   const at::Tensor& sums,
                                                   const std::optional<at::Tensor>& weight,
                                                   const std::optional<at::Tensor>& bias,
                                                   bool relu = false);

/// Batch normalization over the batches of all ranks in a group, differentiable twice. Uses the
/// pooled batch's moments (Ioffe and Szegedy 2015). Forward all-reduces 4 C + 1 doubles once and
/// backward 2 C, for any number of ranks.
///
/// Ranks may have batches with different sizes, including empty batches. Gradients for weight and
/// bias cover this rank's outputs only; data-parallel training adds the gradients.
///
/// @param input, weight, bias, running_mean, running_var, num_batches_tracked, residual, momentum,
///   eps, relu as in batch_norm_elemt().
/// @param packed reduced moments that an earlier call returned for the same input: the forward pass
///   then communicates nothing and does not update the running statistics.
/// @param training false: use the running statistics, if given.
/// @param group name of a process group, as in all_reduce_(); `nullopt` (default) means this rank's
///   batch alone.
/// @param caller name of the caller in error messages.
/// @param deterministic as in all_reduce_sum_() (default false).
/// @return output, and the reduced moments (empty with running statistics).
/// @throws c10::Error naming `caller` and the argument, before anything is written; and naming the
///   missing ranks when a collective fails.
TORCHFUSE_API std::tuple<at::Tensor, at::Tensor> sync_batch_norm(
    const at::Tensor& input, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& running_mean,
    const std::optional<at::Tensor>& running_var,
    const std::optional<at::Tensor>& num_batches_tracked, const std::optional<at::Tensor>& residual,
    const std::optional<at::Tensor>& packed, bool training, std::optional<double> momentum,
    double eps, bool relu = false, const std::optional<std::string>& group = std::nullopt,
    const std::string& caller = "sync_batch_norm", bool deterministic = false);

}  // namespace torchfuse
