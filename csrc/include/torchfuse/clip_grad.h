// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <string>
#include <vector>

#include <torchfuse/export.h>

namespace torchfuse {

/// Scales the gradients of all parameters by one number, so that their norm is at most `max_norm`:
///
///     grad *= min(1, max_norm / (norm + 1e-6))
///
/// The counterpart of Python's torch.nn.utils.clip_grad_norm_, which gives the norm back as a
/// tensor; torch::nn::utils::clip_grad_norm_ of C++ makes the host wait for a number. The 2-norm is
/// that of multi_tensor_l2_norm(): one read, sums of squares that cannot overflow. It needs the
/// gradients to be fp32, fp16 or bf16; those of other types and other orders are computed by
/// ATen, tensor by tensor, in fp32 for 16-bit gradients and in the gradients' own type otherwise.
/// A norm that is not finite makes gradients zero or NaN, as torch's function does.
///
///     loss.backward();
///     const torch::Tensor norm = torchfuse::clip_grad_norm_(model->parameters(), 1.0);
///     optimizer.step();
///
/// An optimizer with the option `max_grad_norm` clips inside its step, without a pass of its own.
///
/// @param parameters any mix of fp32, fp16, bf16 and fp64, on any devices; those without a gradient
///   are left out. Gradients may have any strides, but not be sparse.
/// @param max_norm at least 0; infinity only measures.
/// @param norm_type order of the norm, any number but NaN; infinity is the largest magnitude, and 0
///   counts the gradients that are not all zero, as torch does.
/// @param error_if_nonfinite throw, before anything is written, if the norm is not finite. Then the
///   host waits for the device; otherwise it reads nothing.
/// @return the norm before clipping, 0-dim, on the first gradient's device: fp64 if a gradient is,
///   otherwise fp32 (torch's has the gradients' own type). Without gradients 0, on the CPU.
/// @throws c10::ValueError for a bad `max_norm` or `norm_type`; c10::NotImplementedError for a
///   sparse gradient, with its index; c10::Error for a norm that is not finite, with torch's text.
TORCHFUSE_API at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                                         double norm_type = 2.0, bool error_if_nonfinite = false);

/// clip_grad_norm_() of some parameters: clip_grad_norm_({weight, bias}, 1.0).
inline at::Tensor clip_grad_norm_(std::initializer_list<at::Tensor> parameters, double max_norm,
                                  double norm_type = 2.0, bool error_if_nonfinite = false) {
  return clip_grad_norm_(std::vector<at::Tensor>(parameters), max_norm, norm_type,
                         error_if_nonfinite);
}

/// clip_grad_norm_() of one parameter.
inline at::Tensor clip_grad_norm_(const at::Tensor& parameter, double max_norm,
                                  double norm_type = 2.0, bool error_if_nonfinite = false) {
  return clip_grad_norm_(std::vector<at::Tensor>{parameter}, max_norm, norm_type,
                         error_if_nonfinite);
}

/// Puts every element of all gradients into [-clip_value, clip_value]; NaN stays NaN.
///
/// The counterpart of torch.nn.utils.clip_grad_value_.
///
///     torchfuse::clip_grad_value_(model->parameters(), 0.5);
///
/// @param parameters as those of clip_grad_norm_().
/// @param clip_value at least 0.
/// @throws c10::ValueError for a bad `clip_value`; c10::NotImplementedError for a sparse gradient.
TORCHFUSE_API void clip_grad_value_(const std::vector<at::Tensor>& parameters, double clip_value);

/// clip_grad_value_() of some parameters.
inline void clip_grad_value_(std::initializer_list<at::Tensor> parameters, double clip_value) {
  clip_grad_value_(std::vector<at::Tensor>(parameters), clip_value);
}

/// clip_grad_value_() of one parameter.
inline void clip_grad_value_(const at::Tensor& parameter, double clip_value) {
  clip_grad_value_(std::vector<at::Tensor>{parameter}, clip_value);
}

/// The norm over all elements of all tensors: what clip_grad_norm_() measures.
///
///     const torch::Tensor norm = torchfuse::get_total_norm({a, b});
///
/// @param tensors as the gradients of clip_grad_norm_(); undefined ones are left out.
/// @param norm_type as that of clip_grad_norm_().
/// @param shard_groups for each tensor the names of the process groups (c10d's) over whose
///   processes it is split, `tensors[i]` being this process's part. Empty: no tensor is split. One
///   collective for all tensors that are split alike; all processes must make the same call.
/// @return as clip_grad_norm_().
/// @throws c10::ValueError for a bad `norm_type` or `shard_groups` of another length;
///   c10::NotImplementedError for a sparse tensor, with its index.
TORCHFUSE_API at::Tensor get_total_norm(
    const std::vector<at::Tensor>& tensors, double norm_type = 2.0,
    const std::vector<std::vector<std::string>>& shard_groups = {});

/// Scales tensors whose norm is known, in place: tensor *= min(1, max_norm / (total_norm + 1e-6)).
///
///     const torch::Tensor norm = torchfuse::get_total_norm(gradients);
///     torchfuse::clip_with_norm_(gradients, 1.0, norm);
///
/// @param tensors as those of get_total_norm().
/// @param max_norm at least 0.
/// @param total_norm 1 element; not read by the host.
/// @throws c10::ValueError for a bad `max_norm`; c10::NotImplementedError for a sparse tensor.
TORCHFUSE_API void clip_with_norm_(const std::vector<at::Tensor>& tensors, double max_norm,
                                   const at::Tensor& total_norm);

/// Puts every element of all tensors into [-clip_value, clip_value]; NaN stays NaN.
///
///     torchfuse::clip_value_(gradients, 0.5);
///
/// @param tensors as those of get_total_norm().
/// @param clip_value at least 0.
/// @throws c10::ValueError for a bad `clip_value`; c10::NotImplementedError for a sparse tensor.
TORCHFUSE_API void clip_value_(const std::vector<at::Tensor>& tensors, double clip_value);

}  // namespace torchfuse
