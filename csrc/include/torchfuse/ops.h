// SPDX-License-Identifier: BSD-3-Clause
// The ops torch.ops.torchfuse.* as C++ functions. Each goes through the dispatcher.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

#include <torchfuse/batch_norm.h>
#include <torchfuse/export.h>
#include <torchfuse/layer_norm.h>
#include <torchfuse/softmax_cross_entropy.h>

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
/// Under `amsgrad`, max_exp_avg_sq = max(max_exp_avg_sq, v) replaces v in the last line. Without
/// `bias_correction`, both bias corrections are 1. Same results as torch.optim.Adam and AdamW up to
/// rounding (Kingma and Ba 2015; Loshchilov and Hutter 2019).
///
/// @param params fp32, fp16, bf16 or fp64; dense, any strides.
/// @param grads same sizes as `params`; fp32, fp16, bf16 or fp64; never modified.
/// @param exp_avgs, exp_avg_sqs m and v, same sizes and strides as `params`; each fp32, bf16 or
///   fp16 (fp64 for fp64 parameters). Arithmetic is in fp32 (fp64); stored values are rounded.
/// @param max_exp_avg_sqs as `exp_avgs`; may be empty unless `amsgrad`.
/// @param state_steps 0-dim fp32 step counts on the parameters' device, each in its own memory.
/// @param master_params fp32 masters of 16-bit parameters, or empty. The master is updated and the
///   parameter receives the rounded value. bf16 parameters may have int16 remainders instead: see
///   master_of_remainder().
/// @param lr learning rate; ignored if `lr_tensor` is given.
/// @param beta1, beta2 decay rates of the moments, in [0, 1).
/// @param weight_decay, eps as in the formula, >= 0.
/// @param amsgrad, maximize, adam_w_mode, bias_correction as in the formula (default false, false,
///   true, true).
/// @param lr_tensor 0-dim fp32 or fp64 tensor that replaces `lr`.
/// @param grad_scale 1-element fp32: gradients are multiplied by its reciprocal.
/// @param found_inf 1-element fp32: if not 0, nothing changes, including the step counts.
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

/// One LAMB step on lists of tensors, in place. From You et al. 2020, with apex's options.
///
/// With g = +-grad / grad_scale (minus under `maximize`), and for each tensor:
///
///     step += 1
///     g    += weight_decay * param                 (adam_w_mode = false)
///     m    += (1 - beta1) (g - m);  v += (1 - beta2) (g^2 - v)
///     u     = m / (1 - beta1^step) / (sqrt(v) / sqrt(1 - beta2^step) + eps)
///     u    += weight_decay * param                 (adam_w_mode = true)
///     trust = |param| / |u|, at least `min_trust_ratio` and at most `max_trust_ratio`
///     param -= lr * trust * u
///
/// trust is 1 if either norm is 0, or if weight_decay is 0 without `use_nvlamb`. Without
/// `grad_averaging`, m = beta1 m + g. Without `bias_correction`, both bias corrections are 1. Norms
/// cover whole tensors, and use masters if given.
///
/// Other arguments are as in fused_adam_(). Moments are rounded to their dtype before the update is
/// computed from them.
/// @throws c10::Error naming the argument and the list index, before anything is written.
TORCHFUSE_API void fused_lamb_(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
                               at::TensorList exp_avg_sqs, at::TensorList state_steps,
                               at::TensorList master_params, double lr, double beta1, double beta2,
                               double weight_decay, double eps, double min_trust_ratio = 0.0,
                               std::optional<double> max_trust_ratio = std::nullopt,
                               bool bias_correction = true, bool adam_w_mode = true,
                               bool grad_averaging = true, bool use_nvlamb = false,
                               bool maximize = false,
                               const std::optional<at::Tensor>& lr_tensor = std::nullopt,
                               const std::optional<at::Tensor>& grad_scale = std::nullopt,
                               const std::optional<at::Tensor>& found_inf = std::nullopt);

/// One SGD step on lists of tensors, in place. Momentum as in Sutskever et al. 2013.
///
/// With g = +-grad / grad_scale (minus under `maximize`):
///
///     step += 1
///     g += weight_decay * param                    (unless wd_after_momentum)
///     b  = momentum * b + (1 - dampening) * g      (b = g where step is 1)
///     d  = g + momentum * b (nesterov), else b     (d = g, and no b, where momentum is 0)
///     d += weight_decay * param                    (wd_after_momentum)
///     param -= lr * d
///
/// Same results as torch.optim.SGD up to rounding. The step count alone identifies the first step,
/// because a step that a scaler skips must not be the first. Start with zeroed buffers and counts.
///
/// @param params, grads, state_steps, master_params as in fused_adam_().
/// @param momentum_buffers b, with the sizes, strides and dtypes of `exp_avgs` in fused_adam_();
///   may be empty if `momentum` is 0.
/// @param lr learning rate.
/// @param momentum, dampening, weight_decay as in the formula, >= 0.
/// @param nesterov, wd_after_momentum, maximize as in the formula (default false).
/// @param lr_tensor, grad_scale, found_inf as in fused_adam_().
/// @throws c10::Error naming the argument and the list index, before anything is written.
TORCHFUSE_API void fused_sgd_(at::TensorList params, at::TensorList grads,
                              at::TensorList momentum_buffers, at::TensorList state_steps,
                              at::TensorList master_params, double lr, double momentum,
                              double dampening, double weight_decay, bool nesterov = false,
                              bool wd_after_momentum = false, bool maximize = false,
                              const std::optional<at::Tensor>& lr_tensor = std::nullopt,
                              const std::optional<at::Tensor>& grad_scale = std::nullopt,
                              const std::optional<at::Tensor>& found_inf = std::nullopt);

/// One Adagrad step on lists of tensors, in place (Duchi, Hazan and Singer 2011).
///
/// With g = +-grad / grad_scale (minus under `maximize`):
///
///     step += 1
///     r  = lr / (1 + (step - 1) * lr_decay)
///     g += weight_decay * param                    (adagrad_w_mode = false)
///     sum += g^2
///     param -= r * g / (sqrt(sum) + eps)
///     param -= r * weight_decay * param            (adagrad_w_mode = true, with the old param)
///
/// Same results as torch.optim.Adagrad up to rounding.
///
/// @param params, grads, state_steps, master_params as in fused_adam_().
/// @param sums with the sizes, strides and dtypes of `exp_avgs` in fused_adam_().
/// @param lr learning rate.
/// @param lr_decay, eps, weight_decay as in the formula, >= 0.
/// @param adagrad_w_mode, maximize as in the formula.
/// @param lr_tensor, grad_scale, found_inf as in fused_adam_().
/// @throws c10::Error naming the argument and the list index, before anything is written.
TORCHFUSE_API void fused_adagrad_(at::TensorList params, at::TensorList grads, at::TensorList sums,
                                  at::TensorList state_steps, at::TensorList master_params,
                                  double lr, double lr_decay, double eps, double weight_decay,
                                  bool adagrad_w_mode = false, bool maximize = false,
                                  const std::optional<at::Tensor>& lr_tensor = std::nullopt,
                                  const std::optional<at::Tensor>& grad_scale = std::nullopt,
                                  const std::optional<at::Tensor>& found_inf = std::nullopt);

/// One NovoGrad step on lists of tensors, in place. From Ginsburg et al. 2019, with apex's options.
///
/// With g = +-grad / grad_scale (minus under `maximize`), and for each tensor:
///
///     step += 1
///     n  = sqrt(beta2 n^2 + (1 - beta2) |g|^2)     (inf_norm: n = beta2 n + (1 - beta2) max|g|)
///     d  = n / sqrt(1 - beta2^step) + eps
///     m  = beta1 m + (1 - beta1) g                 (without grad_averaging: beta1 m + g)
///     param -= lr * (m / (1 - beta1^step) / d + weight_decay * param)
///
/// Where step is 1, n is the norm of g, unless `init_zero`. With `reg_inside_moment`:
///
///     m  = beta1 m + (1 - beta1) (g / d + weight_decay * param)
///     param -= lr * m / (1 - beta1^step)
///
/// Without `bias_correction`, both bias corrections are 1. If d is 0, 1 / d is taken as 0.
///
/// @param params, grads, state_steps, master_params as in fused_adam_().
/// @param exp_avgs m, as in fused_adam_().
/// @param exp_avg_norms n, not its square: 0-dim, fp64 for an fp64 parameter, else fp32.
/// @param lr learning rate.
/// @param beta1, beta2 decay rates, in [0, 1).
/// @param weight_decay, eps as in the formula, >= 0.
/// @param bias_correction, grad_averaging, reg_inside_moment, inf_norm, init_zero, maximize as in
///   the formula.
/// @param lr_tensor, grad_scale, found_inf as in fused_adam_().
/// @throws c10::Error naming the argument and the list index, before anything is written.
TORCHFUSE_API void fused_novograd_(at::TensorList params, at::TensorList grads,
                                   at::TensorList exp_avgs, at::TensorList exp_avg_norms,
                                   at::TensorList state_steps, at::TensorList master_params,
                                   double lr, double beta1, double beta2, double weight_decay,
                                   double eps, bool bias_correction = true,
                                   bool grad_averaging = true, bool reg_inside_moment = false,
                                   bool inf_norm = false, bool init_zero = false,
                                   bool maximize = false,
                                   const std::optional<at::Tensor>& lr_tensor = std::nullopt,
                                   const std::optional<at::Tensor>& grad_scale = std::nullopt,
                                   const std::optional<at::Tensor>& found_inf = std::nullopt);

/// One LARS step on lists of tensors, in place (You, Gitman and Ginsburg 2017, Algorithm 1).
///
/// With g = +-grad / grad_scale (minus under `maximize`), and for each tensor:
///
///     step += 1
///     local = trust_coefficient |param| / (|g| + weight_decay |param| + eps)
///     u  = lr * local * (g + weight_decay * param)
///     b  = momentum * b + u
///     param -= b                                   (nesterov: u + momentum * b)
///
/// local is 1 if either norm is 0. Norms cover whole tensors, and use masters if given.
///
/// @param params, grads, state_steps, master_params as in fused_adam_().
/// @param momentum_buffers b, with the sizes, strides and dtypes of `exp_avgs` in fused_adam_().
/// @param lr learning rate.
/// @param momentum, weight_decay, trust_coefficient, eps as in the formula, >= 0.
/// @param nesterov, maximize as in the formula (default false).
/// @param lr_tensor, grad_scale, found_inf as in fused_adam_().
/// @throws c10::Error naming the argument and the list index, before anything is written.
TORCHFUSE_API void fused_lars_(at::TensorList params, at::TensorList grads,
                               at::TensorList momentum_buffers, at::TensorList state_steps,
                               at::TensorList master_params, double lr, double momentum,
                               double weight_decay, double trust_coefficient, double eps,
                               bool nesterov = false, bool maximize = false,
                               const std::optional<at::Tensor>& lr_tensor = std::nullopt,
                               const std::optional<at::Tensor>& grad_scale = std::nullopt,
                               const std::optional<at::Tensor>& found_inf = std::nullopt);

/// One Lion step on lists of tensors, in place. From Chen et al. 2023.
///
/// With g = +-grad / grad_scale (minus under `maximize`):
///
///     step += 1
///     c     = m + (1 - beta1) (g - m)
///     m    += (1 - beta2) (g - m)
///     param -= lr * weight_decay * param + lr * sign(c)
///
/// Arguments are as in fused_adam_(); `exp_avgs` contains m.
/// @throws c10::Error naming the argument and the list index, before anything is written.
TORCHFUSE_API void fused_lion_(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
                               at::TensorList state_steps, at::TensorList master_params, double lr,
                               double beta1, double beta2, double weight_decay,
                               bool maximize = false,
                               const std::optional<at::Tensor>& lr_tensor = std::nullopt,
                               const std::optional<at::Tensor>& grad_scale = std::nullopt,
                               const std::optional<at::Tensor>& found_inf = std::nullopt);

/// One Muon step on lists of matrices, in place. From Jordan et al. 2024.
///
/// With g = grad / grad_scale:
///
///     step += 1
///     m    += (1 - momentum) (g - m)
///     d     = m + (1 - momentum) (g - m)    (nesterov), else m
///     param -= lr * weight_decay * param + lr * factor * orthogonalized(d)
///
/// `orthogonalized` is `ns_steps` Newton-Schulz iterations x <- a x + (b A + c A A) x with
/// A = x x^T, after a division by the Frobenius norm (at least `eps`). `factor` is
/// sqrt(max(1, rows / columns)), 0.2 sqrt(max(rows, columns)) with `match_rms_adamw`, or
/// sqrt(rows / columns) with `spectral_unclamped`. The first dimension counts the rows, and the
/// other dimensions together count the columns.
///
/// Without `use_muon` the step is AdamW's, with the moments `exp_avgs` and `exp_avg_sqs` and
/// without `momentum_buffers`, which contains m; with `use_muon`, the lists of moments are empty.
/// `matrix_dims` is the number of last dimensions that form a matrix, and a parameter with more
/// dimensions is a stack of matrices; 0: all dimensions form one matrix. `polar_express` uses the
/// coefficients of Amsel et al. 2025 in the place of ns_a to ns_c. `ns_float32` and `ns_bfloat16`
/// select the dtype of the iterations; neither: bf16 on CUDA devices and on processors that
/// multiply in bf16, else fp32; fp64 parameters always iterate in fp64. `ns_batched` multiplies
/// matrices of one shape together; if false, a matrix's result does not depend on other matrices,
/// bit for bit. The other arguments are as in fused_adam_().
/// @throws c10::Error naming the argument and the list index, before anything is written.
TORCHFUSE_API void fused_muon_(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
                               at::TensorList exp_avg_sqs, at::TensorList momentum_buffers,
                               at::TensorList state_steps, at::TensorList master_params, double lr,
                               double weight_decay, double momentum, double beta1 = 0.9,
                               double beta2 = 0.999, double eps = 1e-7, double ns_a = 3.4445,
                               double ns_b = -4.775, double ns_c = 2.0315, double ns_steps = 5,
                               double matrix_dims = 0, bool nesterov = true, bool use_muon = true,
                               bool polar_express = false, bool match_rms_adamw = false,
                               bool spectral_unclamped = false, bool ns_float32 = false,
                               bool ns_bfloat16 = false, bool ns_batched = true,
                               const std::optional<at::Tensor>& lr_tensor = std::nullopt,
                               const std::optional<at::Tensor>& grad_scale = std::nullopt,
                               const std::optional<at::Tensor>& found_inf = std::nullopt);

/// Multiplies every tensor by `inv_scale` in place and sets `found_inf` to 1 if an element was not
/// finite before. Reads and writes each tensor once; `found_inf` is never cleared. The counterpart
/// of torch's _amp_foreach_non_finite_check_and_unscale_ for any mix of fp32, fp16, bf16 and fp64
/// and any strides.
///
/// @param tensors all on one device.
/// @param found_inf, inv_scale 1-element fp32 on the same device.
/// @throws c10::Error naming the argument and the list index, before anything is written.
TORCHFUSE_API void multi_tensor_unscale_(at::TensorList tensors, const at::Tensor& found_inf,
                                         const at::Tensor& inv_scale);

/// Returns the L2 norm over all elements of all tensors, and whether any element is not finite, in
/// one read. The sum of squares cannot overflow. The result is bit-identical on every run and for
/// every number of threads.
///
/// @param tensors any mix of fp32, fp16, bf16 and fp64 on one device.
/// @return {norm, found_inf}: 0-dim fp32 tensors on the tensors' device. An empty list gives zeros
///   on the CPU. A backward pass through either throws, because they have no derivative.
/// @throws c10::Error naming the list index.
TORCHFUSE_API std::tuple<at::Tensor, at::Tensor> multi_tensor_l2_norm(at::TensorList tensors);

/// Updates a loss scale in place after a step (torch.amp's rule; with `hysteresis` > 1, apex's).
///
/// @param scale, found_inf 1-element fp32 on one device.
/// @param growth_tracker 1-element int32 on that device: clean steps since last overflow or growth.
/// @param growth_factor multiplies the scale after `growth_interval` clean steps in a row.
/// @param backoff_factor multiplies the scale after an overflow.
/// @param growth_interval clean steps in a row before the scale grows.
/// @param hysteresis_tracker 1-element int32, required if `hysteresis` > 1.
/// @param hysteresis overflows in a row that trigger a backoff; 1 (default) is torch's rule.
/// @param min_scale lower bound at a backoff; `nullopt` (default) means 0, torch's rule.
/// @param max_scale upper bound of growth; `nullopt` (default) means the largest fp32 number.
/// @param dynamic false: only counts and history change; the scale and its trackers do not (default
///   true).
/// @param counts int64 [3]: updates, overflows, and whether the last update had an overflow.
/// @param history fp32 [n, 2], a ring of the last n updates; requires `counts`. Row updates % n
///   stores the scale before the update and whether there was an overflow.
/// @throws c10::Error naming the argument, before anything is written.
TORCHFUSE_API void amp_update_scale_(
    const at::Tensor& scale, const at::Tensor& growth_tracker, const at::Tensor& found_inf,
    double growth_factor, double backoff_factor, std::int64_t growth_interval,
    const std::optional<at::Tensor>& hysteresis_tracker = std::nullopt, std::int64_t hysteresis = 1,
    std::optional<double> min_scale = std::nullopt, std::optional<double> max_scale = std::nullopt,
    bool dynamic = true, const std::optional<at::Tensor>& counts = std::nullopt,
    const std::optional<at::Tensor>& history = std::nullopt);

}  // namespace torchfuse
