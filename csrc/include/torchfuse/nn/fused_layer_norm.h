// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <ostream>
#include <utility>
#include <vector>

#include <torchfuse/export.h>

namespace torchfuse::nn {

/// Options of FusedLayerNorm and FusedRMSNorm, with names from torch::nn::LayerNormOptions.
struct FusedLayerNormOptions {
  /// @param normalized_shape sizes of the last dimensions, which are normalized together.
  FusedLayerNormOptions(std::vector<std::int64_t> normalized_shape)  // NOLINT
      : normalized_shape_(std::move(normalized_shape)) {}

  TORCH_ARG(std::vector<std::int64_t>, normalized_shape);  ///< sizes of the normalized dimensions
  TORCH_ARG(double, eps) = 1e-5;               ///< added to the variance (RMS: mean square)
  TORCH_ARG(bool, elementwise_affine) = true;  ///< learn weight and bias
  TORCH_ARG(bool, bias) = true;                ///< learn a bias; ignored by FusedRMSNorm
  /// Saves the output for the backward pass instead of the input; see layer_norm().
  TORCH_ARG(bool, memory_efficient) = false;
};

/// Common base of FusedLayerNorm and FusedRMSNorm.
class TORCHFUSE_API FusedNormalization {
 public:
  FusedLayerNormOptions options;  ///< options given to the constructor
  at::Tensor weight;  ///< shape normalized_shape; undefined without `elementwise_affine`

 protected:
  /// `name` is the layer's name in error messages. Throws if normalized_shape is empty or has a
  /// negative size.
  FusedNormalization(const char* name, FusedLayerNormOptions options_);
  /// Checks the input's shape and calls layer_norm().
  at::Tensor normalize(const at::Tensor& input, const at::Tensor& bias, bool rms) const;
  /// Writes the layer and its options to a stream.
  void print(std::ostream& stream) const;
  /// Returns an uninitialized tensor of shape normalized_shape; undefined without
  /// `elementwise_affine`.
  at::Tensor empty_parameter() const;

 private:
  const char* name_;
};

/// Layer normalization (Ba, Kiros and Hinton 2016) with one kernel each for forward and backward,
/// on CPU and CUDA: the counterpart of Python's torchfuse.normalization.FusedLayerNorm. See
/// torchfuse::layer_norm() for the formula.
///
///     torchfuse::nn::FusedLayerNorm norm(torchfuse::nn::FusedLayerNormOptions({64}));
///     auto y = norm(torch::randn({8, 64}));
class TORCHFUSE_API FusedLayerNormImpl : public torch::nn::Cloneable<FusedLayerNormImpl>,
                                         public FusedNormalization {
 public:
  /// @throws c10::Error if normalized_shape is empty or has a negative size.
  explicit FusedLayerNormImpl(FusedLayerNormOptions options_);
  /// Constructs a layer over the last dimensions with default options.
  explicit FusedLayerNormImpl(std::vector<std::int64_t> normalized_shape)
      : FusedLayerNormImpl(FusedLayerNormOptions(std::move(normalized_shape))) {}

  /// @param input [..., *normalized_shape], fp32, fp16, bf16 or fp64.
  /// @return output with the input's shape and dtype.
  /// @throws c10::Error naming the layer if shape, dtype or device do not fit.
  at::Tensor forward(const at::Tensor& input);

  /// Registers new parameters with initial values.
  void reset() override;
  /// Resets weight to 1 and bias to 0.
  void reset_parameters();
  /// Writes the layer and its options to a stream.
  void pretty_print(std::ostream& stream) const override { print(stream); }

  at::Tensor bias;  ///< shape normalized_shape; undefined without `elementwise_affine` or `bias`
};

/// Module holder of a FusedLayerNormImpl, with the same constructor arguments.
TORCH_MODULE(FusedLayerNorm);

/// RMS normalization (Zhang and Sennrich 2019): like FusedLayerNorm, but without subtracting a mean
/// and without a bias.
///
///     torchfuse::nn::FusedRMSNorm norm(torchfuse::nn::FusedLayerNormOptions({64}).eps(1e-6));
///     auto y = norm(torch::randn({8, 64}));
class TORCHFUSE_API FusedRMSNormImpl : public torch::nn::Cloneable<FusedRMSNormImpl>,
                                       public FusedNormalization {
 public:
  /// @throws c10::Error if normalized_shape is empty or has a negative size.
  explicit FusedRMSNormImpl(FusedLayerNormOptions options_);
  /// Constructs a layer over the last dimensions with default options.
  explicit FusedRMSNormImpl(std::vector<std::int64_t> normalized_shape)
      : FusedRMSNormImpl(FusedLayerNormOptions(std::move(normalized_shape))) {}

  /// Normalizes `input`; see FusedLayerNormImpl::forward().
  at::Tensor forward(const at::Tensor& input);

  /// Registers a new weight with initial values.
  void reset() override;
  /// Resets weight to 1.
  void reset_parameters();
  /// Writes the layer and its options to a stream.
  void pretty_print(std::ostream& stream) const override { print(stream); }
};

/// Module holder of a FusedRMSNormImpl, with the same constructor arguments.
TORCH_MODULE(FusedRMSNorm);

}  // namespace torchfuse::nn
