// SPDX-License-Identifier: BSD-3-Clause
// Weight averages for any optimizer, and batch normalization statistics for averaged weights.
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

/// AveragedModel's options.
struct TORCHFUSE_API AveragedModelOptions {
  /// Decay of an exponential moving average, in [0, 1]. `nullopt` (default) weights all updates
  /// equally, which is stochastic weight averaging.
  TORCH_ARG(std::optional<double>, decay) = std::nullopt;
  /// Averages floating-point buffers too. By default, an update copies the model's buffers.
  TORCH_ARG(bool, use_buffers) = false;
  /// Device of the averages. `nullopt` (default) means the devices of the model's tensors.
  TORCH_ARG(std::optional<c10::Device>, device) = std::nullopt;
};

/// A copy of a model that holds averages of the model's parameters, like Python's
/// `torch.optim.swa_utils.AveragedModel`:
///
///     average = decay * average + (1 - decay) * parameter      (exponential moving average)
///     average = average + (parameter - average) / (n + 1)      (equal weights, after n updates)
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
/// The first update copies the model's values. For an exponential moving average with a fused
/// optimizer, prefer the option `ema_decay`: the step itself then updates the averages, with less
/// memory traffic. AveragedModel supports any optimizer, and also equal weights. Checkpoints store
/// the module under Python's names.
class TORCHFUSE_API AveragedModel : public torch::nn::Module {
 public:
  /// Clones the model with its dtypes. Does not advance torch's default CPU generator.
  /// @param model a `torch::nn::Cloneable`, as torch's modules are.
  /// @param options decay, buffers and device; see AveragedModelOptions.
  /// @throws c10::ValueError for a decay outside [0, 1].
  /// @throws c10::Error for a model that cannot be cloned.
  explicit AveragedModel(const torch::nn::Module& model, AveragedModelOptions options = {});

  /// Adds the model's current weights to the averages. A tensor that the model registers under
  /// several names is averaged once. The averages keep their dtypes: call
  /// `averaged.module()->to(torch::kFloat)` once to average a bf16 model in fp32.
  /// @throws c10::ValueError if names or sizes of parameters or buffers differ from the copied
  ///   model; nothing is changed.
  void update_parameters(const torch::nn::Module& model);

  /// Returns the copy that holds the averages.
  [[nodiscard]] std::shared_ptr<torch::nn::Module> module() const { return module_; }
  /// Returns the update count.
  [[nodiscard]] std::int64_t n_averaged() const;

 private:
  AveragedModelOptions options_;
  std::shared_ptr<torch::nn::Module> module_;
  at::Tensor n_averaged_;
};

/// Sets a module to training mode and makes its batch normalization layers (torch's and
/// SyncBatchNorm) compute cumulative averages over all batches, starting from reset statistics. The
/// destructor restores momenta and modes. update_bn() uses this class.
class TORCHFUSE_API BatchNormUpdate {
 public:
  /// @param model module that outlives this object.
  explicit BatchNormUpdate(torch::nn::Module& model);
  ~BatchNormUpdate();
  BatchNormUpdate(const BatchNormUpdate&) = delete;
  BatchNormUpdate& operator=(const BatchNormUpdate&) = delete;

  /// Returns whether a batch normalization layer tracks running statistics.
  [[nodiscard]] bool needed() const { return needed_; }

 private:
  void restore() noexcept;

  bool needed_ = false;
  std::vector<std::function<void()>> restore_;
};

/// Recomputes the running statistics of batch normalization layers for averaged weights, without
/// gradients, like Python's `torch.optim.swa_utils.update_bn`. The copied statistics match the
/// weights of a single step. If no layer tracks running statistics, the loader is not read.
///
///     torchfuse::optim::update_bn(loader, *averaged.module(), [&](const auto& batch) {
///       averaged.module()->as<Net>()->forward(batch.data);
///     });
///
/// @param loader range of batches.
/// @param model module whose statistics are recomputed.
/// @param forward callable that runs the model on one batch.
template <typename Loader, typename Forward>
void update_bn(Loader&& loader, torch::nn::Module& model, Forward&& forward) {
  const at::NoGradGuard no_grad;
  const BatchNormUpdate update(model);
  if (!update.needed()) return;
  for (auto&& batch : loader) forward(batch);
}

}  // namespace torchfuse::optim
