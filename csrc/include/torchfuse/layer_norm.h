// SPDX-License-Identifier: BSD-3-Clause
// The ops of layer and RMS normalization, torch.ops.torchfuse.*, as C++ functions; ops.h includes
// them.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include <torchfuse/export.h>

namespace torchfuse {

/// Layer normalization (Ba, Kiros and Hinton 2016) or, with `rms`, RMS normalization (Zhang and
/// Sennrich 2019) of the last `normalized_dims` dimensions, differentiable:
///
///     y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias
///     y = x / sqrt(mean(x^2) + eps) * weight + bias                              (rms)
///
/// Moments are computed in fp32, and in fp64 for fp64. Gradients can be differentiated again,
/// except with `memory_efficient`.
///
/// @param input fp32, fp16, bf16 or fp64. Copied where it is not contiguous.
/// @param normalized_dims number of dimensions that one mean is taken over, at least 1.
/// @param weight, bias of the shape of these dimensions, of any of these dtypes; 1 and 0 if absent.
/// @param eps added to the mean of squares.
/// @param rms subtract no mean.
/// @param dtype of the output: the input's, or fp32 for 16-bit input. None: the input's.
/// @param memory_efficient keep the output for the backward pass instead of the input, which is
///   recomputed from it. Weights nearer to 0 than 1e-5 count as 1e-5 there.
/// @param caller name of the caller in error messages.
/// @return output, contiguous, of input's sizes.
/// @throws c10::Error naming `caller` and the argument.
TORCHFUSE_API at::Tensor layer_norm(const at::Tensor& input, std::int64_t normalized_dims,
                                    const std::optional<at::Tensor>& weight = std::nullopt,
                                    const std::optional<at::Tensor>& bias = std::nullopt,
                                    double eps = 1e-5, bool rms = false,
                                    std::optional<at::ScalarType> dtype = std::nullopt,
                                    bool memory_efficient = false,
                                    const std::string& caller = "layer_norm");

/// The forward pass of layer_norm().
///
/// @param input, normalized_dims, weight, bias, eps, rms, dtype as in layer_norm().
/// @return output; mean of each row (empty with `rms`); and 1 / sqrt(mean square + eps) of each
/// row:
///   fp32, or fp64 for fp64, of the shape of the dimensions that are not normalized.
/// @throws c10::Error naming the argument.
TORCHFUSE_API std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_forward(
    const at::Tensor& input, std::int64_t normalized_dims, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias, double eps, bool rms = false,
    std::optional<at::ScalarType> dtype = std::nullopt);

/// The backward pass of layer_norm(). Sums over rows have the same bits on every run and, on the
/// CPU, for every number of threads.
///
/// @param grad_output of the output's sizes and dtype.
/// @param source the input; or the output, with `from_output`.
/// @param normalized_dims, weight, bias, rms as in layer_norm(). `bias` is read with `from_output`.
/// @param mean, rstd as layer_norm_forward() returned them; `mean` is not read with `rms` or
///   `from_output`.
/// @param from_output recompute the normalized input from the output.
/// @param dtype of the input. None: that of `source`.
/// @param output_mask which gradients are wanted.
/// @return gradients of input, weight and bias, in their dtypes; undefined where not wanted.
/// @throws c10::Error naming the argument.
TORCHFUSE_API std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_backward(
    const at::Tensor& grad_output, const at::Tensor& source, std::int64_t normalized_dims,
    const std::optional<at::Tensor>& mean, const at::Tensor& rstd,
    const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    bool rms = false, bool from_output = false, std::optional<at::ScalarType> dtype = std::nullopt,
    std::array<bool, 3> output_mask = {true, true, true});

}  // namespace torchfuse
