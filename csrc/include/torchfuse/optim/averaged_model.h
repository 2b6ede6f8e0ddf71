// SPDX-License-Identifier: BSD-3-Clause
// Averages of a model's weights beside any optimizer, and statistics of batch normalization for
// them.
#pragma once

#include <ATen/core/grad_mode.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <torchfuse/export.h>

namespace torchfuse::optim {

/// Options of an `AveragedModel`.
struct TORCHFUSE_API AveragedModelOptions {
  /// Of an exponential moving average, in [0, 1]; none: all updates count alike, which is
  /// stochastic weight averaging.
  TORCH_ARG(std::optional<double>, decay) = std::nullopt;
  /// Whether floating-point buffers are averaged too; else they are the model's of the last update.
  TORCH_ARG(bool, use_buffers) = false;
  /// Where the averages are; none: where the model is.
  TORCH_ARG(std::optional<c10::Device>, device) = std::nullopt;
};

/// A copy of a model with averages of its parameters, as Python's
/// `torch.optim.swa_utils.AveragedModel`:
///
///     average = decay * average + (1 - decay) * parameter      (exponential moving average)
///     average = average + (parameter - average) / (n + 1)      (n updates before)
///
///     auto averaged = torchfuse::optim::AveragedModel(
///         *model, torchfuse::optim::AveragedModelOptions().decay(0.999));
///     for (auto& batch : loader) {
///       ...
///       optimizer.step();
///       averaged.update_parameters(*model);
///     }
///     auto prediction = averaged.module()->as<Net>()->forward(data);
///
/// The first update copies. The fused optimizers keep an exponential moving average in the step
/// itself (`ema_decay`), which reads and writes less; this class is for other optimizers and for
/// equal weights. It is a module of its own: checkpoints hold it under Python's names.
class TORCHFUSE_API AveragedModel : public torch::nn::Module {
 public:
  /// @param model what is copied, with its dtypes: a `torch::nn::Cloneable`, as torch's own modules
  ///   are. Torch's default generator is as before.
  /// @param options decay, buffers and device.
  /// @throws c10::ValueError for a decay outside [0, 1]; c10::Error for a model that cannot be
  ///   cloned.
  explicit AveragedModel(const torch::nn::Module& model, AveragedModelOptions options = {});

  /// Adds the model's present weights to the averages. The averages keep their dtypes: after
  /// `averaged.module()->to(torch::kFloat)` those of a bf16 model lose nothing to rounding. What is
  /// the model under several names is averaged once.
  /// @throws c10::ValueError if names or sizes of parameters or buffers are not those of the model
  ///   that was copied; nothing is changed.
  void update_parameters(const torch::nn::Module& model);

  /// The copy that holds the averages.
  [[nodiscard]] std::shared_ptr<torch::nn::Module> module() const { return module_; }
  /// Number of updates.
  [[nodiscard]] std::int64_t n_averaged() const;

 private:
  AveragedModelOptions options_;
  std::shared_ptr<torch::nn::Module> module_;
  at::Tensor n_averaged_;
};

/// While it lives, a module is in training mode, and its batch normalizations (torch's and
/// SyncBatchNorm) average their statistics over all batches from the beginning. Then momenta and
/// modes are as before.
class TORCHFUSE_API BatchNormUpdate {
 public:
  /// @param model which must outlive this object.
  explicit BatchNormUpdate(torch::nn::Module& model);
  ~BatchNormUpdate();
  BatchNormUpdate(const BatchNormUpdate&) = delete;
  BatchNormUpdate& operator=(const BatchNormUpdate&) = delete;

  /// Whether there is a batch normalization with running statistics.
  [[nodiscard]] bool needed() const { return needed_; }

 private:
  void restore() noexcept;

  bool needed_ = false;
  std::vector<std::function<void()>> restore_;
};

/// Computes the running statistics of batch normalization anew, for averaged weights: those that
/// were copied belong to the weights of one step. As Python's `torch.optim.swa_utils.update_bn`,
/// without gradients. If there are no such statistics, nothing is read.
///
///     torchfuse::optim::update_bn(loader, *averaged.module(), [&](const auto& batch) {
///       averaged.module()->as<Net>()->forward(batch.data);
///     });
///
/// @param loader what a `for` loop takes.
/// @param model whose statistics are computed.
/// @param forward runs the model on one batch.
template <typename Loader, typename Forward>
void update_bn(Loader&& loader, torch::nn::Module& model, Forward&& forward) {
  const at::NoGradGuard no_grad;
  const BatchNormUpdate update(model);
  if (!update.needed()) return;
  for (auto&& batch : loader) forward(batch);
}

}  // namespace torchfuse::optim
