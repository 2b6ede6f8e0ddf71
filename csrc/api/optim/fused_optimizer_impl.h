// SPDX-License-Identifier: BSD-3-Clause
// FusedOptimizer's private members.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torchfuse/fused_step.h>
#include <torchfuse/optim/fused_optimizer.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "step_lock.h"

namespace torchfuse::optim {

inline std::vector<at::Tensor> params_of(
    const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  std::vector<at::Tensor> params;
  for (const auto& group : groups) {
    params.insert(params.end(), group.params().begin(), group.params().end());
  }
  return params;
}

/// Returns the tensor's version, or 0 for inference tensors, which have no version.
inline std::int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : tensor._version();
}

/// Describes optimizer parameters that are shards of a model's parameters.
struct ShardsOfModel {
  std::vector<std::string> groups;           ///< see FusedSlot::shard_groups
  std::vector<std::int64_t> first_elements;  ///< each shard's offset in the unsharded parameter
  /// Groups of the model's parameters, which hold the gradients. These groups have no options.
  std::vector<torch::optim::OptimizerParamGroup> model_groups;
  std::function<void()> share;  ///< all-gathers the shards' values
};

/// The native step, the plan's parameters and the lock.
struct FusedOptimizer::Impl {
  /// One parameter of the plan.
  struct Param {
    std::size_t group;
    bool has_state;
    bool stochastic_rounding;
  };

  /// A parameter that was exchanged with its average. `kept` is a 16-bit parameter's own value.
  struct Swapped {
    at::Tensor param;
    at::Tensor ema;
    at::Tensor kept;
    std::int64_t version = 0;  ///< version of `param` after the exchange
  };

  std::optional<FusedStep> fused_step;
  std::vector<Param> params;
  std::vector<SlotTensors> slots;  ///< empty between steps
  StepLock lock;
  std::vector<std::string> norm_groups;
  at::Tensor skip_norm_above;  ///< replaces the option if defined
  /// Exchanged parameters; `nullopt` while no parameter holds its average.
  std::optional<std::vector<Swapped>> swapped;
  std::optional<ShardsOfModel> shards;  ///< `nullopt`: the parameters are the model's

  /// Restores all parameters on all ranks. Warns if parameters were written since the exchange.
  void swap_back(const char* name);
  /// Restores this rank's parameters. Removes restored parameters from `swapped`, so that after an
  /// error the next call continues with the rest.
  void restore_swapped(const char* name);
};

/// Holds an optimizer's lock. Throws if the thread already holds the lock.
class Exclusive {
 public:
  Exclusive(StepLock& lock, const char* name) : lock_(lock) {
    TORCH_CHECK(
        lock_.lock(), name,
        ": called during a step of the same optimizer. Call it after the step has returned.");
  }
  ~Exclusive() { lock_.unlock(); }
  Exclusive(const Exclusive&) = delete;
  Exclusive& operator=(const Exclusive&) = delete;
  Exclusive(Exclusive&&) = delete;
  Exclusive& operator=(Exclusive&&) = delete;

 private:
  StepLock& lock_;
};

}  // namespace torchfuse::optim
