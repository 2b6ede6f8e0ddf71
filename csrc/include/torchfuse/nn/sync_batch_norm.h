// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>

#include <torchfuse/export.h>

namespace torchfuse::nn {

/// SyncBatchNorm's options, with names and defaults from torch::nn::BatchNormOptions.
struct SyncBatchNormOptions {
  /// @param num_features number of channels C, >= 1, of an input [N, C, ...].
  SyncBatchNormOptions(std::int64_t num_features) : num_features_(num_features) {}  // NOLINT

  TORCH_ARG(std::int64_t, num_features);             ///< channels C of an input [N, C, ...]
  TORCH_ARG(double, eps) = 1e-5;                     ///< added to the variance
  TORCH_ARG(std::optional<double>, momentum) = 0.1;  ///< nullopt: cumulative average over batches
  TORCH_ARG(bool, affine) = true;                    ///< learn weight and bias
  TORCH_ARG(bool, track_running_stats) = true;       ///< track running statistics for evaluation
  TORCH_ARG(bool, fuse_relu) = false;                ///< clamp the output at 0
  TORCH_ARG(bool, deterministic) = false;            ///< sum ranks in order; see all_reduce_sum_()
  TORCH_ARG(std::optional<std::string>, process_group);  ///< name; nullopt: no communication
};

/// Batch normalization with mean and variance over the batches of all ranks. Until a process group
/// is attached, the layer is plain batch normalization. Kernels, results and state names match
/// Python's torchfuse.parallel.SyncBatchNorm.
///
/// Inputs may have any layout, may be empty, and are fp32, fp16, bf16 or fp64. Forward and backward
/// each make one all-reduce. A residual and a ReLU can be fused into the same pass.
///
///     struct Net : torch::nn::Module {
///       torch::nn::Conv2d conv{torch::nn::Conv2dOptions(3, 64, 3).bias(false)};
///       torchfuse::nn::SyncBatchNorm norm{
///           torchfuse::nn::SyncBatchNormOptions(64).fuse_relu(true)};
///       ...
///     };
///     auto group = torchfuse::parallel::init_process_group();
///     torchfuse::parallel::convert_sync_batch_norm(*net, group.name());
///
/// For the formula (Ioffe and Szegedy 2015) see torchfuse::batch_norm_elemt(), and for the
/// communication torchfuse::sync_batch_norm().
class TORCHFUSE_API SyncBatchNormImpl : public torch::nn::Cloneable<SyncBatchNormImpl> {
 public:
  /// Constructs a layer with `num_features` channels and default options.
  explicit SyncBatchNormImpl(std::int64_t num_features)
      : SyncBatchNormImpl(SyncBatchNormOptions(num_features)) {}
  /// @throws c10::Error if num_features is not positive.
  explicit SyncBatchNormImpl(SyncBatchNormOptions options);

  /// @param input [N, C, ...], fp32, fp16, bf16 or fp64.
  /// @param residual tensor with the input's sizes and dtype, added before the ReLU (default:
  ///   none).
  /// @return output with the input's sizes and dtype.
  /// @throws c10::Error naming the layer if the input's channels or dtype or the residual do not
  ///   fit, if a single process trains with one value per channel, if ranks differ in num_features
  ///   or dtype, or if a rank exits or times out.
  at::Tensor forward(const at::Tensor& input, const at::Tensor& residual = {});

  /// Makes all later forward() calls synchronize with the ranks of a process group.
  ///
  /// @param group name of a process group that outlives the layer. Empty: plain batch
  ///   normalization.
  /// @param layer_name the layer's name in error messages. Empty (default): unchanged.
  void attach_group(const std::string& group, const std::string& layer_name = "");

  /// Registers new parameters and buffers with initial values.
  void reset() override;
  /// Resets the running statistics: mean 0, variance 1, batch count 0.
  void reset_running_stats();
  /// Resets weight to 1 and bias to 0, and the running statistics.
  void reset_parameters();
  /// Writes the layer and its options to a stream.
  void pretty_print(std::ostream& stream) const override;

  SyncBatchNormOptions options;    ///< constructor's options, with the attached group
  at::Tensor weight;               ///< [C]; undefined without `affine`
  at::Tensor bias;                 ///< [C]; undefined without `affine`
  at::Tensor running_mean;         ///< [C]; undefined without `track_running_stats`
  at::Tensor running_var;          ///< [C]; undefined without `track_running_stats`
  at::Tensor num_batches_tracked;  ///< 0-dim int64; undefined without `track_running_stats`

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(at::Tensor())})

 private:
  std::string caller() const;
  /// Returns the group if it has several ranks. Checks once that the ranks agree on num_features
  /// and dtype.
  std::optional<std::string> group_to_sync(const at::Tensor& input);

  std::string layer_name_;
  std::string agreed_;
};

/// Module holder of a SyncBatchNormImpl, with the same constructor arguments.
TORCH_MODULE(SyncBatchNorm);

}  // namespace torchfuse::nn
