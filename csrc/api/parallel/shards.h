// SPDX-License-Identifier: BSD-3-Clause
// What ShardedOptimizer adds to an optimizer: shards of parameters, and the work around a step.
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

/// The parameters of a model in flat memory, and this rank's shards of them. A shard shares the
/// version counter of its parameter, from which steps see that a parameter was written.
class Shards {
 public:
  using StateDict = c10::impl::GenericDict;

  /// Compares the ranks, and moves the parameters into flat memory.
  /// @param options one line for each group, and one for the defaults.
  /// @param refusal why this rank cannot shard the optimizer, which all ranks throw; empty: it can.
  Shards(const std::vector<torch::optim::OptimizerParamGroup>& groups,
         const std::vector<std::string>& options, const std::string& refusal,
         c10::intrusive_ptr<c10d::ProcessGroup> group);

  std::int64_t size() const { return collectives_.size(); }
  /// As FusedSlot::shard_groups.
  const std::vector<std::string>& groups() const { return groups_; }
  /// Returns the number of the first element of this rank's shard of parameter `index`.
  std::int64_t first_element(std::size_t index) const {
    return partition_.range(index, collectives_.rank()).first;
  }
  const std::vector<at::Tensor>& params() const { return params_; }  ///< the model's
  const std::vector<at::Tensor>& shards() const { return shards_; }  ///< this rank's shard of each
  /// The groups of the model's parameters, without options.
  const std::vector<torch::optim::OptimizerParamGroup>& model_groups() const { return model_; }

  /// Returns whether the next step compares the ranks. Where the host would have to wait for a GPU,
  /// only the first step does.
  bool compares_step() const;
  /// Compares the ranks, and gives the shards their gradients. Throws on all ranks or on none;
  /// after an exception nothing has changed.
  /// @param groups of the shards.
  /// @param options as above; ignored in a step that does not compare.
  void before_step(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                   const std::vector<std::string>& options);
  /// Drops the shards' gradients after a step, whether it succeeded or not.
  void drop_gradients();
  /// Resets the gradients of the model.
  void zero_gradients(bool set_to_none);
  /// Gathers all shards on all ranks.
  void gather() const;

  /// What the optimizer's class defines.
  struct Class {
    std::unordered_set<std::string> numbers;  ///< states with one number for a parameter
    std::function<StateDict(const optim::FusedOptimizer&)> state_of_shards;
  };
  void set_class(Class its) { class_ = std::move(its); }
  /// Returns the state dict of an optimizer of the shards.
  StateDict state_of_shards(const optim::FusedOptimizer& optimizer) const {
    return class_.state_of_shards(optimizer);
  }
  /// Returns the state dict of the whole parameters, on the CPU; a collective.
  /// @param keep false: this rank takes part, and its result has undefined tensors.
  StateDict whole_state(const StateDict& of_shards, bool keep = true) const;
  /// Returns this rank's shard of a state dict of whole parameters.
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
  std::vector<const void*> addresses_;  ///< of the parameters in flat memory
  // torch's zero_grad() is not virtual. Called through a base class it would reset the gradients of
  // the shards and leave the model's, so the first shard holds a marker between steps.
  at::Tensor marker_;
  std::int64_t marker_version_ = 0;
  bool stepped_ = false;
};

}  // namespace torchfuse::parallel
