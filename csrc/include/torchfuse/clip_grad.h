// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <string>
#include <vector>

#include <torchfuse/export.h>

namespace torchfuse {

/// Scales the gradients of all parameters by one factor, so that the norm is at most `max_norm`:
///
///     grad *= min(1, max_norm / (norm + 1e-6))
///
/// The counterpart of Python's torch.nn.utils.clip_grad_norm_. Returns the norm as a tensor,
/// whereas torch::nn::utils::clip_grad_norm_ in C++ synchronizes with the device to return a
/// number. For fp32, fp16 and bf16 gradients the 2-norm is computed by multi_tensor_l2_norm(), in
/// one read and with sums of squares that cannot overflow. ATen computes other orders and fp64
/// tensor by tensor, in fp32 for 16-bit gradients and otherwise in the gradients' dtype. A norm
/// that is not finite makes gradients zero or NaN, as in torch's function.
///
///     loss.backward();
///     const torch::Tensor norm = torchfuse::clip_grad_norm_(model->parameters(), 1.0);
///     optimizer.step();
///
/// An optimizer with the option `max_grad_norm` clips inside its step, without a separate pass.
///
/// @param parameters any mix of fp32, fp16, bf16 and fp64, on any devices. Parameters without a
///   gradient are ignored. Gradients must be dense and may have any strides.
/// @param max_norm at least 0; infinity measures without clipping.
/// @param norm_type order of the norm, any number but NaN (default 2). Infinity is the largest
///   magnitude, and 0 counts the gradients that are not all zero, as in torch.
/// @param error_if_nonfinite throw, before anything is written, if the norm is not finite (default
///   false). With true, the host synchronizes with the device; otherwise only if some gradients are
///   on the CPU and others on CUDA.
/// @return the norm before clipping, 0-dim, on the first gradient's device: fp64 if a gradient is
///   fp64, otherwise fp32 (torch uses the gradients' dtype). Without gradients, 0 on the CPU.
/// @throws c10::ValueError for an invalid `max_norm` or `norm_type`.
/// @throws c10::NotImplementedError for a sparse gradient, with its index.
/// @throws c10::Error for a norm that is not finite, with torch's text.
TORCHFUSE_API at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                                         double norm_type = 2.0, bool error_if_nonfinite = false);

/// Calls clip_grad_norm_() for a list of parameters: clip_grad_norm_({weight, bias}, 1.0).
inline at::Tensor clip_grad_norm_(std::initializer_list<at::Tensor> parameters, double max_norm,
                                  double norm_type = 2.0, bool error_if_nonfinite = false) {
  return clip_grad_norm_(std::vector<at::Tensor>(parameters), max_norm, norm_type,
                         error_if_nonfinite);
}

/// Calls clip_grad_norm_() for one parameter.
inline at::Tensor clip_grad_norm_(const at::Tensor& parameter, double max_norm,
                                  double norm_type = 2.0, bool error_if_nonfinite = false) {
  return clip_grad_norm_(std::vector<at::Tensor>{parameter}, max_norm, norm_type,
                         error_if_nonfinite);
}

/// Clamps every element of all gradients to [-clip_value, clip_value]; NaN stays NaN. The
/// counterpart of Python's torch.nn.utils.clip_grad_value_.
///
///     torchfuse::clip_grad_value_(model->parameters(), 0.5);
///
/// @param parameters as in clip_grad_norm_().
/// @param clip_value at least 0.
/// @throws c10::ValueError for an invalid `clip_value`.
/// @throws c10::NotImplementedError for a sparse gradient.
TORCHFUSE_API void clip_grad_value_(const std::vector<at::Tensor>& parameters, double clip_value);

/// Calls clip_grad_value_() for a list of parameters.
inline void clip_grad_value_(std::initializer_list<at::Tensor> parameters, double clip_value) {
  clip_grad_value_(std::vector<at::Tensor>(parameters), clip_value);
}

/// Calls clip_grad_value_() for one parameter.
inline void clip_grad_value_(const at::Tensor& parameter, double clip_value) {
  clip_grad_value_(std::vector<at::Tensor>{parameter}, clip_value);
}

/// Returns the norm over all elements of all tensors, as clip_grad_norm_() computes it.
///
///     const torch::Tensor norm = torchfuse::get_total_norm({a, b});
///
/// @param tensors like the gradients in clip_grad_norm_(); undefined tensors are ignored.
/// @param norm_type as in clip_grad_norm_() (default 2).
/// @param shard_groups for each tensor, the names of the process groups (c10d's) over which the
///   tensor is sharded; `tensors[i]` is then this process's shard. Empty (default): no tensor is
///   sharded. Tensors with identical shard groups share collectives. All processes must make the
///   same call.
/// @return the norm, as clip_grad_norm_() returns it.
/// @throws c10::ValueError for an invalid `norm_type` or `shard_groups` of another length.
/// @throws c10::NotImplementedError for a sparse tensor, with its index.
TORCHFUSE_API at::Tensor get_total_norm(
    const std::vector<at::Tensor>& tensors, double norm_type = 2.0,
    const std::vector<std::vector<std::string>>& shard_groups = {});

/// Scales tensors whose norm is known, in place: tensor *= min(1, max_norm / (total_norm + 1e-6)).
///
///     const torch::Tensor norm = torchfuse::get_total_norm(gradients);
///     torchfuse::clip_with_norm_(gradients, 1.0, norm);
///
/// @param tensors as in get_total_norm().
/// @param max_norm at least 0.
/// @param total_norm 1 element; not read by the host.
/// @throws c10::ValueError for an invalid `max_norm` or `total_norm`.
/// @throws c10::NotImplementedError for a sparse tensor.
TORCHFUSE_API void clip_with_norm_(const std::vector<at::Tensor>& tensors, double max_norm,
                                   const at::Tensor& total_norm);

/// Clamps every element of all tensors to [-clip_value, clip_value]; NaN stays NaN.
///
///     torchfuse::clip_value_(gradients, 0.5);
///
/// @param tensors as in get_total_norm().
/// @param clip_value at least 0.
/// @throws c10::ValueError for an invalid `clip_value`.
/// @throws c10::NotImplementedError for a sparse tensor.
TORCHFUSE_API void clip_value_(const std::vector<at::Tensor>& tensors, double clip_value);

}  // namespace torchfuse
