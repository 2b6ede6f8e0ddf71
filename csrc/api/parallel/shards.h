// SPDX-License-Identifier: BSD-3-Clause
// ShardedOptimizer's shards of parameters, and the work before and after a step.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torchfuse/optim/fused_optimizer.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "api/parallel/collectives.h"
#include "api/parallel/partition.h"

namespace torchfuse::parallel {

inline constexpr const char* kSharded = "torchfuse::parallel::ShardedOptimizer";

/// The model's parameters in flat memory, and this rank's shards. A shard and its parameter share a
/// version counter, so that steps notice writes to the parameter.
class Shards {
 public:
  using StateDict = c10::impl::GenericDict;

  /// Compares the ranks, and moves the parameters into flat memory.
  /// @param options a line for each group, and a line for the defaults.
  /// @param unsupported why this rank cannot shard the optimizer, thrown on all ranks; or empty.
  Shards(const std::vector<torch::optim::OptimizerParamGroup>& groups,
         const std::vector<std::string>& options, const std::string& unsupported,
         c10::intrusive_ptr<c10d::ProcessGroup> group);

  std::int64_t size() const { return collectives_.size(); }
  /// Returns the value of FusedSlot::shard_groups.
  const std::vector<std::string>& groups() const { return groups_; }
  /// Returns the number of the first element in this rank's shard of parameter `index`.
  std::int64_t first_element(std::size_t index) const {
    return partition_.range(index, collectives_.rank()).first;
  }
  const std::vector<at::Tensor>& params() const { return params_; }  ///< the model's
  const std::vector<at::Tensor>& shards() const { return shards_; }  ///< this rank's shards
  /// Returns the model's parameters by group, without options.
  const std::vector<torch::optim::OptimizerParamGroup>& model_groups() const { return model_; }

  /// Returns whether the next step compares the ranks. Only the first step does if the comparison
  /// would make the host wait for a GPU.
  bool compares_step() const;
  /// Compares the ranks, and assigns the shards their gradients. Throws on all ranks or on none;
  /// after an exception nothing has changed.
  /// @param groups groups with the shards.
  /// @param options as in the constructor; ignored in a step that does not compare.
  void before_step(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                   const std::vector<std::string>& options);
  /// Drops the shards' gradients after a step, also after a failed step.
  void drop_gradients();
  /// Resets the model's gradients.
  void zero_gradients(bool set_to_none);
  /// All-gathers the parameters.
  void gather() const;

  /// Properties of the optimizer's class.
  struct Class {
    std::unordered_set<std::string> numbers;  ///< states with one number per parameter
    std::function<StateDict(const optim::FusedOptimizer&)> state_of_shards;
  };
  void set_class(Class its) { class_ = std::move(its); }
  /// Returns the state dict for the shards.
  StateDict state_of_shards(const optim::FusedOptimizer& optimizer) const {
    return class_.state_of_shards(optimizer);
  }
  /// Returns the unsharded state dict, on the CPU. A collective.
  /// @param keep false: take part, but return undefined tensors (default true).
  StateDict whole_state(const StateDict& of_shards, bool keep = true) const;
  /// Returns this rank's shard of an unsharded state dict.
  StateDict own_state(const StateDict& whole) const;

 private:
  std::vector<std::string> described(const std::vector<std::string>& options) const;
  std::string summary(const std::vector<std::string>& options) const;
  void compare(const char* what, const std::string& summary,
               const std::function<std::vector<std::string>()>& lines) const;
  bool moved(std::size_t index) const;
  void check_program(const std::vector<torch::optim::OptimizerParamGroup>& groups) const;
  void check_gradients() const;
  void take_gradients();
  bool is_sharded(const c10::IValue& key, const c10::IValue& value) const;
  void compare_states(const StateDict& states) const;
  at::Tensor gathered(std::size_t index, const at::Tensor& shard, bool keep) const;

  Collectives collectives_;
  std::vector<at::Tensor> params_;
  Partition partition_;
  std::vector<at::Tensor> shards_;
  std::vector<at::Tensor> flats_;
  Class class_;
  std::vector<std::string> groups_;
  std::vector<torch::optim::OptimizerParamGroup> model_;
  std::vector<const void*> addresses_;  ///< the parameters' addresses in flat memory
  // torch's zero_grad() is not virtual. A call through a base class resets only the shards'
  // gradients. The first shard's gradient is a marker between steps, to detect such a call.
  at::Tensor marker_;
  std::int64_t marker_version_ = 0;
  bool stepped_ = false;
};

}  // namespace torchfuse::parallel
