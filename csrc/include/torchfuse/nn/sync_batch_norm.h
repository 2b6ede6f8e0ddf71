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

/// Options of SyncBatchNorm, with the names and defaults of torch::nn::BatchNormOptions.
struct SyncBatchNormOptions {
  /// @param num_features number of channels C of an input [N, C, ...].
  SyncBatchNormOptions(std::int64_t num_features) : num_features_(num_features) {}  // NOLINT

  TORCH_ARG(std::int64_t, num_features);             ///< channels C of an input [N, C, ...]
  TORCH_ARG(double, eps) = 1e-5;                     ///< added to the variance
  TORCH_ARG(std::optional<double>, momentum) = 0.1;  ///< none: cumulative average over all batches
  TORCH_ARG(bool, affine) = true;                    ///< have weight and bias
  TORCH_ARG(bool, track_running_stats) = true;       ///< keep statistics for evaluation
  TORCH_ARG(bool, fuse_relu) = false;                ///< clamp the output at 0
  TORCH_ARG(bool, deterministic) = false;            ///< add ranks in order; see all_reduce_sum_()
  TORCH_ARG(std::optional<std::string>, process_group);  ///< name; none: this process alone
};

/// Batch normalization with the mean and variance of all processes' batches together; plain batch
/// normalization until a process group is attached. Kernels, results and state names are those of
/// torchfuse.parallel.SyncBatchNorm in Python: inputs of any layout in fp32, fp16, bf16 or fp64,
/// one all-reduce in forward and one in backward, empty batches, and an optional residual and ReLU
/// in the same pass.
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
/// See torchfuse::batch_norm_elemt() for the formula (Ioffe and Szegedy 2015), and
/// torchfuse::sync_batch_norm() for the communication.
class TORCHFUSE_API SyncBatchNormImpl : public torch::nn::Cloneable<SyncBatchNormImpl> {
 public:
  /// Constructs a layer of `num_features` channels with the other options at their defaults.
  explicit SyncBatchNormImpl(std::int64_t num_features)
      : SyncBatchNormImpl(SyncBatchNormOptions(num_features)) {}
  /// @throws c10::Error if num_features is not positive.
  explicit SyncBatchNormImpl(SyncBatchNormOptions options);

  /// @param input [N, C, ...], fp32, fp16, bf16 or fp64.
  /// @param residual of input's sizes and dtype, added before the ReLU; undefined: none.
  /// @throws c10::Error naming this layer if the number of channels, the dtype or the residual does
  ///   not fit, if one process trains with one value per channel, if ranks differ in num_features
  ///   or dtype, or if a rank ends or is late.
  at::Tensor forward(const at::Tensor& input, const at::Tensor& residual = {});

  /// Makes all later calls of forward() synchronize with the ranks of a process group.
  ///
  /// @param group name of a group that must stay alive; empty: plain batch normalization.
  /// @param layer_name name of this layer in error messages; empty: unchanged.
  void attach_group(const std::string& group, const std::string& layer_name = "");

  /// Registers new parameters and buffers, with their initial values.
  void reset() override;
  /// Resets the running statistics: mean 0, variance 1, no batches.
  void reset_running_stats();
  /// Resets weight to 1 and bias to 0, and the running statistics.
  void reset_parameters();
  /// Writes the layer and its options to a stream.
  void pretty_print(std::ostream& stream) const override;

  SyncBatchNormOptions options;    ///< as given, with the group that was attached
  at::Tensor weight;               ///< [C]; undefined without `affine`
  at::Tensor bias;                 ///< [C]; undefined without `affine`
  at::Tensor running_mean;         ///< [C]; undefined without `track_running_stats`
  at::Tensor running_var;          ///< [C]; undefined without `track_running_stats`
  at::Tensor num_batches_tracked;  ///< 0-dim int64; undefined without `track_running_stats`

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(at::Tensor())})

 private:
  std::string caller() const;
  /// Returns the group if it has more than one process. Checks, once, that its ranks agree.
  std::optional<std::string> group_to_sync(const at::Tensor& input);

  std::string layer_name_;
  std::string agreed_;
};

/// Module holder of a SyncBatchNormImpl; takes the arguments of its constructors.
TORCH_MODULE(SyncBatchNorm);

}  // namespace torchfuse::nn
