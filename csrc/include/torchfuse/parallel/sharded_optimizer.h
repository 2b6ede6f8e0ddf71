// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Dict.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torchfuse/export.h>
#include <torchfuse/optim/fused_optimizer.h>
#include <torchfuse/parallel/process_group.h>

namespace torchfuse::parallel {

class Shards;

/// Base class of ShardedOptimizer, independent of the optimizer's class.
class TORCHFUSE_API ShardedBase {
 public:
  virtual ~ShardedBase();

 protected:
  friend class torchfuse::Checkpoint;
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;  ///< parameter groups
  using StateDict = c10::impl::GenericDict;                       ///< in Python's layout
  /// Function that returns the optimizer class's state_dict(), with the shards' states.
  using StateOfShards = std::function<StateDict(const torchfuse::optim::FusedOptimizer&)>;

  /// Checks the parameters of `whole` on all ranks, and moves the parameters into flat memory.
  ShardedBase(const torchfuse::optim::FusedOptimizer& whole,
              const c10::intrusive_ptr<c10d::ProcessGroup>& group);
  /// Movable, not copyable.
  ShardedBase(ShardedBase&&) noexcept;
  /// Movable, not copyable.
  ShardedBase& operator=(ShardedBase&&) noexcept;

  /// Returns the groups with the local parameter shards.
  Groups shard_groups(const Groups& whole) const;
  /// Returns the groups with uninitialized CPU tensors in the model's parameter shapes.
  Groups shape_groups(const Groups& of_shards) const;
  /// Registers with an optimizer that all parameters are shards.
  void attach(torchfuse::optim::FusedOptimizer& of_shards, StateOfShards state_of_shards) const;
  /// Throws, because all parameters must be given at construction.
  [[noreturn]] static void refuse_group();
  /// Assigns gradients to the shards, updates the shards, and all-gathers the parameters.
  void step_shards(torchfuse::optim::FusedOptimizer& of_shards,
                   const std::function<void()>& update) const;
  /// Resets the gradients of the model's parameters.
  void zero_gradients(bool set_to_none) const;
  /// Returns the unsharded state dict; a collective.
  StateDict whole_state(const StateDict& of_shards) const;
  /// Returns the local shard of an unsharded state dict.
  StateDict own_state(const StateDict& whole) const;

 private:
  /// Returns why an optimizer cannot be sharded, or an empty string.
  static std::string unsupported(const torchfuse::optim::FusedOptimizer& whole);
  Shards& shards() const;
  std::shared_ptr<Shards> shards_;
};

/// Shards a fused optimizer's states and step over a process group: ZeRO stage 1 (Rajbhandari et
/// al. 2020). Every rank keeps all parameters and all gradients. With N ranks, each rank keeps
/// states for 1/N of the elements and updates only that shard. One all-gather per dtype then copies
/// the updated parameters to all ranks.
///
///     torchfuse::parallel::DistributedDataParallel model(net, group);
///     torchfuse::parallel::ShardedOptimizer<torchfuse::optim::FusedAdam> optimizer(
///         net->parameters(), torchfuse::optim::FusedAdamOptions(1e-3).max_grad_norm(1.0), group);
///
/// Gradients must be equal on all ranks, as after DistributedDataParallel's backward. Results are
/// bit-identical to the unsharded optimizer, except that norms over all elements (clipping, LAMB,
/// LARS, NovoGrad) are summed over ranks, so rounding depends on the group size. FusedMuon's
/// products depend on the matrices that share a rank, unless ns_batched is false.
///
/// ShardedOptimizer is an `Optimizer` over the local shards: `param_groups()` contains
/// one-dimensional views and the step's options. Learning-rate schedulers, amp::GradScaler,
/// EmaWeights and Checkpoint accept a ShardedOptimizer. A Checkpoint needs the group.
///
/// The model's parameters become views of flat memory and must stay there: move and convert the
/// model before construction, and load values in place. Call zero_grad() on a ShardedOptimizer or
/// on the model, not through a reference to a base class.
///
/// step(), EmaWeights, swap_ema_(), state_dict(), save() and load() are collectives: all ranks must
/// call them.
///
/// @tparam Optimizer a class from torchfuse::optim, such as FusedAdam.
template <class Optimizer>
class ShardedOptimizer : public ShardedBase, public Optimizer {
 public:
  using options_t = typename Optimizer::options_t;  ///< the options of the class

  /// @param param_groups the model's parameter groups, equal on all ranks, with rank 0's values.
  ///   Groups without options use `defaults`.
  /// @param defaults hyper-parameters, and the optimizer-wide options.
  /// @param group the ranks that share the states; must outlive the optimizer.
  /// @throws c10::Error for options out of range, for write_back_grads, for parameters with gaps in
  ///   memory or listed twice, and if parameters or options differ between ranks. All ranks throw
  ///   the same error, and nothing changes.
  ShardedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                   options_t defaults, const c10::intrusive_ptr<c10d::ProcessGroup>& group)
      : ShardedOptimizer(Optimizer(param_groups, std::move(defaults)), group) {}
  /// Constructs from a group of init_process_group().
  ShardedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                   options_t defaults, const ProcessGroup& group)
      : ShardedOptimizer(param_groups, std::move(defaults), group.get()) {}
  /// Constructs an optimizer with one parameter group.
  template <class Group>
  ShardedOptimizer(std::vector<torch::Tensor> params, options_t defaults, const Group& group)
      : ShardedOptimizer(
            std::vector<torch::optim::OptimizerParamGroup>{
                torch::optim::OptimizerParamGroup(std::move(params))},
            std::move(defaults), group) {}

  /// Throws. Construct a new optimizer with all parameters, and load this optimizer's state.
  void add_param_group(const torch::optim::OptimizerParamGroup&) { refuse_group(); }
  /// Resets the gradients of the model's parameters.
  void zero_grad(bool set_to_none = true) { zero_gradients(set_to_none); }

  /// Returns the unsharded state dict on every rank, equal to the unsharded optimizer's. The state
  /// dict loads into `Optimizer` in C++ and Python, and into ShardedOptimizer on any number of
  /// ranks. All tensors are on the CPU and share no memory with the optimizer.
  c10::impl::GenericDict state_dict() const override {
    return whole_state(Optimizer::state_dict());
  }
  /// Checks a state dict from `Optimizer`, or from ShardedOptimizer on any number of ranks; see
  /// FusedOptimizer.
  std::function<void()> prepare_state_dict(const c10::impl::GenericDict& state_dict) override {
    return Optimizer::prepare_state_dict(own_state(state_dict));
  }
  /// Writes the unsharded state, as `Optimizer` does. All ranks must call save(), each with an
  /// archive.
  void save(torch::serialize::OutputArchive& archive) const override {
    Optimizer whole = shape();
    whole.load_state_dict(state_dict());
    whole.save(archive);
  }
  /// Reads an archive written by `Optimizer`, or by ShardedOptimizer on any number of ranks.
  void load(torch::serialize::InputArchive& archive) override {
    Optimizer whole = shape();
    whole.load(archive);
    this->load_state_dict(whole.state_dict());
  }

 private:
  void around_step(const std::function<void()>& update) override { step_shards(*this, update); }
  ShardedOptimizer(const Optimizer& whole, const c10::intrusive_ptr<c10d::ProcessGroup>& group)
      : ShardedBase(whole, group),
        Optimizer(shard_groups(whole.param_groups()),
                  static_cast<const options_t&>(whole.defaults())) {
    attach(*this, [](const torchfuse::optim::FusedOptimizer& own) {
      return static_cast<const ShardedOptimizer&>(own).Optimizer::state_dict();
    });
  }
  /// Returns an optimizer over tensors with the model's parameter shapes, without values.
  Optimizer shape() const {
    return Optimizer(shape_groups(this->param_groups()),
                     static_cast<const options_t&>(this->defaults()));
  }
};

}  // namespace torchfuse::parallel
