// SPDX-License-Identifier: BSD-3-Clause
// What ShardedOptimizer adds to an optimizer: parts of parameters, and what surrounds a step.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torchfuse/optim/fused_optimizer.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "api/parallel/buckets.h"
#include "api/parallel/collectives.h"
#include "api/parallel/gathers.h"
#include "api/parallel/gradient_parts.h"

namespace torchfuse::parallel {

inline constexpr const char* kSharded = "torchfuse::parallel::ShardedOptimizer";

/// The parts share counts of writes with the parameters, by which masters are kept up to date.
class Shards : public GradientParts {
 public:
  using StateDict = c10::impl::GenericDict;

  /// Compares the processes, and moves the parameters into flat memory.
  /// @param options one line for each group, and those of the defaults.
  /// @param refusal what this process cannot split, for all to know; empty: nothing.
  /// @param units modules that wait for their parameters; not looked at where something is refused.
  /// @param scattered sizes of buckets, where a Reducer gives the parts their gradients; none: a
  ///   step takes them from the model's parameters.
  Shards(const std::vector<torch::optim::OptimizerParamGroup>& groups,
         const std::vector<std::string>& options, const std::string& refusal,
         c10::intrusive_ptr<c10d::ProcessGroup> group, const std::vector<GatherUnit>& units,
         std::optional<BucketSizes> scattered);

  /// As FusedSlot::shard_groups.
  const std::vector<std::string>& groups() const { return groups_; }
  std::int64_t size() const { return collectives_.size(); }
  std::int64_t rank() const { return collectives_.rank(); }
  /// Of the model, without options.
  const std::vector<torch::optim::OptimizerParamGroup>& model_groups() const { return model_; }
  /// Whether a Reducer gives the parts their gradients, before a step and not in it.
  bool scatters() const { return scatters_; }

  /// Whether the next step compares the processes. Where a GPU would have to be waited for, only
  /// the first does.
  bool compares_step() const;
  /// Compares the processes, and gives the parts their gradients. Throws in all processes or in
  /// none, and nothing is changed then.
  /// @param options as above; ignored in a step that does not compare.
  void before_step(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                   const std::vector<std::string>& options);
  /// Takes those of the model from the parts, whatever became of the step, and puts a sign in their
  /// place: torch's zero_grad() is not virtual, and through a base class it resets the gradients of
  /// parts and leaves the model's.
  void return_gradients();
  /// Resets all gradients.
  void zero_gradients(bool set_to_none);
  /// Brings all parts to all processes; what modules wait for may be under way afterwards.
  void gather() { gathers_->run(); }
  /// Waits for what is under way.
  void finish_gather() { gathers_->finish(); }
  /// Waits for the parameters of a module.
  void finish_gather(const torch::nn::Module& module) { gathers_->finish(module); }
  /// When the optimizer goes: see Gathers.
  void leave() noexcept { gathers_->leave(); }
  /// After a step that all processes have made: it has used up the gradients that a Reducer gave.
  void finish_step();

  /// What belongs to the optimizer's class.
  struct Class {
    std::unordered_set<std::string> numbers;  ///< states that have one number for a parameter
    /// What the class itself does, with parts.
    std::function<StateDict(const optim::FusedOptimizer&)> state_dict;
    std::function<std::function<void()>(optim::FusedOptimizer&, const StateDict&)>
        prepare_state_dict;
  };
  void set_class(Class its) { class_ = std::move(its); }
  const Class& its_class() const { return class_; }

  /// The state dict of whole parameters, on the CPU; a collective.
  StateDict whole_state(const StateDict& of_parts) const;
  /// The state dict of whole parameters, with the places of split states in the place of these; a
  /// collective. `own` receives this process's parts, by the keys of parameters and states.
  StateDict placed_state(const StateDict& of_parts, StateDict& own) const;
  /// This process's part of a state of parameter `index` that a state dict has a dict for, the last
  /// argument; the others are its keys.
  using ReadPart = std::function<at::Tensor(std::size_t index, const c10::IValue& param,
                                            const c10::IValue& name, const StateDict& saved)>;
  /// This process's part of a state dict of whole parameters.
  StateDict own_state(const StateDict& whole, const ReadPart& read_part = {}) const;

 private:
  struct SplitState;
  Shards(const std::vector<torch::optim::OptimizerParamGroup>& groups,
         const std::vector<std::string>& options, const std::string& refusal,
         Collectives collectives, const std::vector<GatherUnit>& units,
         std::optional<BucketSizes> scattered);
  std::vector<std::string> described(const std::vector<std::string>& options) const;
  std::string summary(const std::vector<std::string>& options) const;
  void compare(const char* what, const std::string& summary,
               const std::vector<std::string>& options) const;
  bool moved(std::size_t index) const;
  const at::Tensor& gradient(std::size_t index) const;
  void check_program(const std::vector<torch::optim::OptimizerParamGroup>& groups) const;
  void check_gradients() const;
  void take_gradients();
  bool is_split(const c10::IValue& key, const c10::IValue& value) const;
  std::vector<SplitState> split_states(const StateDict& states) const;
  /// The same, after comparing them with those of the other processes.
  std::vector<SplitState> agreed_states(const StateDict& states) const;
  at::Tensor gathered(const StateDict& states, const SplitState& state) const;

  Collectives collectives_;
  Class class_;
  std::vector<std::string> groups_;
  std::vector<torch::optim::OptimizerParamGroup> model_;
  std::shared_ptr<Gathers> gathers_;    ///< has the flat tensors
  std::vector<const void*> addresses_;  ///< of the parameters in flat memory
  at::Tensor sign_;                     ///< the first part's gradient between steps
  std::int64_t sign_version_ = 0;
  bool scatters_;
  bool stepped_ = false;
};

}  // namespace torchfuse::parallel
