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

/// Options of FusedLayerNorm and FusedRMSNorm, with the names of torch::nn::LayerNormOptions.
struct FusedLayerNormOptions {
  /// @param normalized_shape sizes of the last dimensions, over which moments are taken.
  FusedLayerNormOptions(std::vector<std::int64_t> normalized_shape)  // NOLINT
      : normalized_shape_(std::move(normalized_shape)) {}

  TORCH_ARG(std::vector<std::int64_t>, normalized_shape);  ///< sizes of the last dimensions
  TORCH_ARG(double, eps) = 1e-5;                           ///< added to the mean of squares
  TORCH_ARG(bool, elementwise_affine) = true;              ///< have weight and bias
  TORCH_ARG(bool, bias) = true;                            ///< have a bias; RMS: there is none
  /// Keep the output for the backward pass instead of the input; see layer_norm().
  TORCH_ARG(bool, memory_efficient) = false;
};

/// What FusedLayerNorm and FusedRMSNorm have in common.
class TORCHFUSE_API FusedNormalization {
 public:
  FusedLayerNormOptions options;  ///< as given
  at::Tensor weight;              ///< of normalized_shape; undefined without `elementwise_affine`

 protected:
  /// `name` is that of the layer in messages. Throws for a normalized_shape without sizes.
  FusedNormalization(const char* name, FusedLayerNormOptions options_);
  /// Checks the input's shape, and calls layer_norm().
  at::Tensor normalize(const at::Tensor& input, const at::Tensor& bias, bool rms) const;
  /// Writes the layer and its options to a stream.
  void print(std::ostream& stream) const;
  /// Returns uninitialized memory of normalized_shape; undefined without `elementwise_affine`.
  at::Tensor empty_parameter() const;

 private:
  const char* name_;
};

/// Layer normalization (Ba, Kiros and Hinton 2016), one kernel each way, on the CPU and on CUDA;
/// the counterpart of torchfuse.normalization.FusedLayerNorm. See torchfuse::layer_norm() for the
/// formula.
///
///     torchfuse::nn::FusedLayerNorm norm(torchfuse::nn::FusedLayerNormOptions({64}));
///     auto y = norm(torch::randn({8, 64}));
class TORCHFUSE_API FusedLayerNormImpl : public torch::nn::Cloneable<FusedLayerNormImpl>,
                                         public FusedNormalization {
 public:
  /// @throws c10::Error if normalized_shape is empty or has a negative size.
  explicit FusedLayerNormImpl(FusedLayerNormOptions options_);
  /// Constructs a layer over the last dimensions with the other options at their defaults.
  explicit FusedLayerNormImpl(std::vector<std::int64_t> normalized_shape)
      : FusedLayerNormImpl(FusedLayerNormOptions(std::move(normalized_shape))) {}

  /// @param input fp32, fp16, bf16 or fp64; its last dimensions have the sizes normalized_shape.
  /// @return output of input's sizes and dtype.
  /// @throws c10::Error naming this layer if shape, dtype or device do not fit.
  at::Tensor forward(const at::Tensor& input);

  /// Registers new parameters with their initial values.
  void reset() override;
  /// Resets weight to 1 and bias to 0.
  void reset_parameters();
  /// Writes the layer and its options to a stream.
  void pretty_print(std::ostream& stream) const override { print(stream); }

  at::Tensor bias;  ///< of normalized_shape; undefined without `elementwise_affine` or `bias`
};

/// Module holder of a FusedLayerNormImpl; takes the arguments of its constructors.
TORCH_MODULE(FusedLayerNorm);

/// RMS normalization (Zhang and Sennrich 2019), which subtracts no mean and has no bias; otherwise
/// as FusedLayerNorm.
///
///     torchfuse::nn::FusedRMSNorm norm(torchfuse::nn::FusedLayerNormOptions({64}).eps(1e-6));
///     auto y = norm(torch::randn({8, 64}));
class TORCHFUSE_API FusedRMSNormImpl : public torch::nn::Cloneable<FusedRMSNormImpl>,
                                       public FusedNormalization {
 public:
  /// @throws c10::Error if normalized_shape is empty or has a negative size.
  explicit FusedRMSNormImpl(FusedLayerNormOptions options_);
  /// Constructs a layer over the last dimensions with the other options at their defaults.
  explicit FusedRMSNormImpl(std::vector<std::int64_t> normalized_shape)
      : FusedRMSNormImpl(FusedLayerNormOptions(std::move(normalized_shape))) {}

  /// As FusedLayerNormImpl::forward().
  at::Tensor forward(const at::Tensor& input);

  /// Registers a new weight with its initial values.
  void reset() override;
  /// Resets weight to 1.
  void reset_parameters();
  /// Writes the layer and its options to a stream.
  void pretty_print(std::ostream& stream) const override { print(stream); }
};

/// Module holder of a FusedRMSNormImpl; takes the arguments of its constructors.
TORCH_MODULE(FusedRMSNorm);

}  // namespace torchfuse::nn
