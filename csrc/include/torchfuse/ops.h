// SPDX-License-Identifier: BSD-3-Clause
// The ops torch.ops.torchfuse.* as C++ functions. Each goes through the dispatcher.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

#include <torchfuse/export.h>

namespace torchfuse {

/// One Adam or AdamW step on lists of tensors, in place.
///
/// With g = +-grad / grad_scale (minus under `maximize`):
///
///     step += 1
///     g    += weight_decay * param                 (adam_w_mode = false)
///     m    += (1 - beta1) (g - m);  v += (1 - beta2) (g^2 - v)
///     param -= lr * weight_decay * param           (adam_w_mode = true)
///     param -= lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps)
///
/// where v is max_exp_avg_sq = max(max_exp_avg_sq, v) under `amsgrad`, and both bias corrections
/// are 1 without `bias_correction`. Same results as torch.optim.Adam and AdamW up to rounding
/// (Kingma and Ba 2015; Loshchilov and Hutter 2019).
///
/// @param params fp32, fp16, bf16 or fp64; dense, any strides.
/// @param grads same sizes; any of these dtypes; never modified.
/// @param exp_avgs, exp_avg_sqs same sizes and strides; fp32, bf16 or fp16, each for itself, or
///   fp64 for fp64 parameters. Arithmetic is in fp32 (fp64); what is stored is rounded.
/// @param max_exp_avg_sqs as exp_avgs; empty unless `amsgrad`.
/// @param state_steps 0-dim fp32 counts on the parameters' device, each its own element.
/// @param master_params fp32 masters of 16-bit parameters, or empty. The master is updated and the
///   parameter receives its rounded copy. For bf16 parameters also int16 remainders: see
///   master_of_remainder().
/// @param lr learning rate.
/// @param beta1, beta2 decay rates of the moments, in [0, 1).
/// @param weight_decay, eps as in the formula.
/// @param amsgrad, maximize, adam_w_mode, bias_correction as in the formula.
/// @param lr_tensor 0-dim fp32 or fp64 tensor that replaces `lr`.
/// @param grad_scale 1-element fp32: gradients are multiplied by its reciprocal.
/// @param found_inf 1-element fp32: if not 0, nothing changes, the step counts included.
/// @throws c10::Error naming the argument and the list index, before anything is written.
TORCHFUSE_API void fused_adam_(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
                               at::TensorList exp_avg_sqs, at::TensorList max_exp_avg_sqs,
                               at::TensorList state_steps, at::TensorList master_params, double lr,
                               double beta1, double beta2, double weight_decay, double eps,
                               bool amsgrad = false, bool maximize = false, bool adam_w_mode = true,
                               bool bias_correction = true,
                               const std::optional<at::Tensor>& lr_tensor = std::nullopt,
                               const std::optional<at::Tensor>& grad_scale = std::nullopt,
                               const std::optional<at::Tensor>& found_inf = std::nullopt);

/// Multiplies every tensor by `inv_scale` in place and sets `found_inf` to 1 if an element was not
/// finite before. One read and one write; `found_inf` is never cleared. As torch's
/// _amp_foreach_non_finite_check_and_unscale_, for any mix of fp32, fp16, bf16 and fp64 and any
/// strides.
///
/// @param tensors all on one device.
/// @param found_inf, inv_scale 1-element fp32 on the same device.
TORCHFUSE_API void multi_tensor_unscale_(at::TensorList tensors, const at::Tensor& found_inf,
                                         const at::Tensor& inv_scale);

/// The L2 norm over all elements of all tensors, and whether one is not finite, in one read. The
/// sum of squares cannot overflow, and the result is the same bits on every run and thread count.
///
/// @param tensors any mix of fp32, fp16, bf16 and fp64 on one device.
/// @return {norm, found_inf}: 0-dim fp32 tensors on that device. An empty list gives zeros on the
/// CPU.
TORCHFUSE_API std::tuple<at::Tensor, at::Tensor> multi_tensor_l2_norm(at::TensorList tensors);

/// Updates a loss scale in place after a step (torch.amp's rule; with `hysteresis` > 1, apex's).
///
/// @param scale, found_inf 1-element fp32 on one device.
/// @param growth_tracker 1-element int32 on that device: clean steps since the scale last changed.
/// @param growth_factor multiplies the scale after `growth_interval` clean steps in a row.
/// @param backoff_factor multiplies the scale after an overflow.
/// @param growth_interval see `growth_factor`.
/// @param hysteresis_tracker 1-element int32, needed when hysteresis > 1.
/// @param hysteresis overflows in a row that back the scale off; 1 is torch's rule.
TORCHFUSE_API void amp_update_scale_(
    const at::Tensor& scale, const at::Tensor& growth_tracker, const at::Tensor& found_inf,
    double growth_factor, double backoff_factor, std::int64_t growth_interval,
    const std::optional<at::Tensor>& hysteresis_tracker = std::nullopt,
    std::int64_t hysteresis = 1);

}  // namespace torchfuse
