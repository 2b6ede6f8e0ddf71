// SPDX-License-Identifier: BSD-3-Clause
// Layer and RMS normalization ops (torch.ops.torchfuse.*) as C++ functions. ops.h includes this
// header.
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
/// Sennrich 2019) over the last `normalized_dims` dimensions, differentiable:
///
///     y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias
///     y = x / sqrt(mean(x^2) + eps) * weight + bias                              (rms)
///
/// Moments are computed in fp32, and in fp64 for fp64. Gradients can be differentiated again,
/// except with `memory_efficient`.
///
///     const torch::Tensor y = torchfuse::layer_norm(x, 1, weight, bias);
///
/// @param input fp32, fp16, bf16 or fp64. Copied if not contiguous.
/// @param normalized_dims number of dimensions to normalize over, at least 1.
/// @param weight, bias with the normalized dimensions' shape, in any of these dtypes; `nullopt`
///   (default) means 1 and 0.
/// @param eps added to the mean square (default 1e-5).
/// @param rms subtract no mean (default false).
/// @param dtype output dtype: the input's, or fp32 for 16-bit input. `nullopt` (default) means the
///   input's.
/// @param memory_efficient keep the output for the backward pass instead of the input, which is
///   then recomputed (default false). In the recomputation, weights with magnitude below 1e-5 count
///   as 1e-5.
/// @param caller name of the caller in error messages.
/// @return output, contiguous, with the input's sizes.
/// @throws c10::Error naming `caller` and the argument.
TORCHFUSE_API at::Tensor layer_norm(const at::Tensor& input, std::int64_t normalized_dims,
                                    const std::optional<at::Tensor>& weight = std::nullopt,
                                    const std::optional<at::Tensor>& bias = std::nullopt,
                                    double eps = 1e-5, bool rms = false,
                                    std::optional<at::ScalarType> dtype = std::nullopt,
                                    bool memory_efficient = false,
                                    const std::string& caller = "layer_norm");

/// Forward pass for layer_norm().
///
/// @param input, normalized_dims, weight, bias, eps, rms, dtype as in layer_norm().
/// @return output; each row's mean (empty with `rms`); and each row's 1 / sqrt(mean square + eps).
///   Row statistics are fp32, or fp64 for fp64, shaped like the dimensions that are not normalized.
/// @throws c10::Error naming the argument.
TORCHFUSE_API std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_forward(
    const at::Tensor& input, std::int64_t normalized_dims, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias, double eps, bool rms = false,
    std::optional<at::ScalarType> dtype = std::nullopt);

/// Backward pass for layer_norm(). Sums over rows are bit-identical on every run and, on the CPU,
/// for every number of threads.
///
/// @param grad_output with the output's sizes and dtype.
/// @param source the input; or the output, with `from_output`.
/// @param normalized_dims, weight, bias, rms as in layer_norm(). `bias` is read only with
///   `from_output`.
/// @param mean, rstd as layer_norm_forward() returned them; `mean` is not read with `rms` or
///   `from_output`.
/// @param from_output recompute the normalized input from the output (default false).
/// @param dtype dtype of the input; `nullopt` (default) means the dtype of `source`.
/// @param output_mask which gradients to compute (default: all).
/// @return gradients for input, weight and bias, with matching dtypes; undefined if not requested.
/// @throws c10::Error naming the argument.
TORCHFUSE_API std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_backward(
    const at::Tensor& grad_output, const at::Tensor& source, std::int64_t normalized_dims,
    const std::optional<at::Tensor>& mean, const at::Tensor& rstd,
    const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    bool rms = false, bool from_output = false, std::optional<at::ScalarType> dtype = std::nullopt,
    std::array<bool, 3> output_mask = {true, true, true});

}  // namespace torchfuse
