// SPDX-License-Identifier: BSD-3-Clause
// What a fused optimizer holds besides torch's own members.
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

/// How often a tensor was written. Tensors of inference mode do not count.
inline std::int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : tensor._version();
}

/// What is known of parameters that are shards of a model's.
struct ShardsOfModel {
  std::vector<std::string> groups;           ///< as FusedSlot::shard_groups
  std::vector<std::int64_t> first_elements;  ///< of each shard, its number in the whole parameter
  /// The groups of the model's parameters, which hold the gradients; without options.
  std::vector<torch::optim::OptimizerParamGroup> model_groups;
  std::function<void()> share;  ///< brings what the shards hold to the other processes
};

/// The native step with where its plan found what, and the one thread that uses it.
struct FusedOptimizer::Impl {
  /// One parameter of the plan.
  struct Param {
    std::size_t group;
    bool has_state;
    bool stochastic_rounding;
  };

  /// A parameter with an average, and what puts a 16-bit parameter back.
  struct Swapped {
    at::Tensor param;
    at::Tensor ema;
    at::Tensor kept;
    std::int64_t version = 0;  ///< the parameter's, when all had received their averages
  };

  std::optional<FusedStep> fused_step;
  std::vector<Param> params;
  std::vector<SlotTensors> slots;  ///< for the time of a step
  StepLock lock;
  std::vector<std::string> norm_groups;
  at::Tensor skip_norm_above;  ///< a threshold on a device, in the option's place; or undefined
  /// While averages are in the parameters' place.
  std::optional<std::vector<Swapped>> swapped;
  std::optional<ShardsOfModel> shards;  ///< none: the parameters are the model's

  /// Exchanges all back, on all processes. Warns, once, of parameters that were written meanwhile.
  void swap_back(const char* name);
  /// Exchanges the parameters and their averages back. What is back is no longer listed: after an
  /// error, the next call goes on with the rest.
  void restore_swapped(const char* name);
};

/// Holds an optimizer's lock; refuses a step within a step.
class Exclusive {
 public:
  Exclusive(StepLock& lock, const char* name) : lock_(lock) {
    TORCH_CHECK(lock_.lock(), name,
                ": expected no step within a step of the same optimizer, got one.");
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
