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

/// The part of ShardedOptimizer that does not depend on the optimizer's class.
class TORCHFUSE_API ShardedBase {
 public:
  virtual ~ShardedBase();

 protected:
  friend class torchfuse::Checkpoint;
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;  ///< parameter groups
  using StateDict = c10::impl::GenericDict;                       ///< as in Python
  /// state_dict() of the optimizer's class, with the states of the shards.
  using StateOfShards = std::function<StateDict(const torchfuse::optim::FusedOptimizer&)>;

  /// Checks the parameters of `whole` on all ranks, and moves them into flat memory.
  ShardedBase(const torchfuse::optim::FusedOptimizer& whole,
              const c10::intrusive_ptr<c10d::ProcessGroup>& group);
  /// Movable, not copyable.
  ShardedBase(ShardedBase&&) noexcept;
  /// Movable, not copyable.
  ShardedBase& operator=(ShardedBase&&) noexcept;

  /// Returns the groups with this rank's shards of their parameters.
  Groups shard_groups(const Groups& whole) const;
  /// Returns the groups with the shapes of the model's parameters, in memory that is never used.
  Groups shape_groups(const Groups& of_shards) const;
  /// Tells an optimizer that its parameters are shards.
  void attach(torchfuse::optim::FusedOptimizer& of_shards, StateOfShards state_of_shards) const;
  /// Throws: all parameters are given at construction.
  [[noreturn]] static void refuse_group();
  /// Gives the shards their gradients, updates them, and gathers the parameters on all ranks.
  void step_shards(torchfuse::optim::FusedOptimizer& of_shards,
                   const std::function<void()>& update) const;
  /// Resets the gradients of the model's parameters.
  void zero_gradients(bool set_to_none) const;
  /// Returns the state dict of whole parameters; a collective.
  StateDict whole_state(const StateDict& of_shards) const;
  /// Returns this rank's shard of a state dict of whole parameters.
  StateDict own_state(const StateDict& whole) const;

 private:
  /// Returns why an optimizer cannot be sharded; empty: it can.
  static std::string refusal(const torchfuse::optim::FusedOptimizer& whole);
  Shards& shards() const;
  std::shared_ptr<Shards> shards_;
};

/// Shards the states and the step of a fused optimizer over the ranks of a group: stage 1 of ZeRO
/// (Rajbhandari et al. 2020). Every rank has all parameters and all gradients. Each of N ranks
/// keeps the states of one N-th of the elements and updates these elements. One all-gather for each
/// dtype then brings the updated parameters to all ranks.
///
///     torchfuse::parallel::DistributedDataParallel model(net, group);
///     torchfuse::parallel::ShardedOptimizer<torchfuse::optim::FusedAdam> optimizer(
///         net->parameters(), torchfuse::optim::FusedAdamOptions(1e-3).max_grad_norm(1.0), group);
///
/// Gradients must be equal on all ranks, as DistributedDataParallel leaves them. Each element gets
/// the same bits as from the class alone. Norms over all elements (clipping, LAMB, LARS, NovoGrad)
/// are sums over the ranks, whose rounding depends on the number of ranks.
///
/// ShardedOptimizer is an optimizer of its class over this rank's shards: `param_groups()` holds
/// one-dimensional views and the options of the step. Learning-rate schedulers, amp::GradScaler,
/// EmaWeights and Checkpoint accept it. A Checkpoint needs the group.
///
/// The model's parameters become views of flat memory and have to stay there: move and convert the
/// model before, and load it in place. Call zero_grad() of this class or of the model, not through
/// a reference to a base class.
///
/// step(), EmaWeights, swap_ema_(), state_dict(), save() and load() are collectives: all ranks must
/// call them.
///
/// @tparam Optimizer a class of torchfuse::optim, such as FusedAdam.
template <class Optimizer>
class ShardedOptimizer : public ShardedBase, public Optimizer {
 public:
  using options_t = typename Optimizer::options_t;  ///< the options of the class

  /// @param param_groups groups of the model's parameters, the same on all ranks, with the values
  ///   of rank 0. Groups without options of their own get `defaults`.
  /// @param defaults hyper-parameters, and the optimizer-wide options.
  /// @param group the ranks that share the states; it must outlive this object.
  /// @throws c10::Error for options out of range, for write_back_grads, for parameters with gaps in
  ///   memory or listed twice, and if parameters or options differ between ranks. All ranks throw
  ///   the same error, and nothing has changed.
  ShardedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                   options_t defaults, const c10::intrusive_ptr<c10d::ProcessGroup>& group)
      : ShardedOptimizer(Optimizer(param_groups, std::move(defaults)), group) {}
  /// Constructs it with a group of init_process_group().
  ShardedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                   options_t defaults, const ProcessGroup& group)
      : ShardedOptimizer(param_groups, std::move(defaults), group.get()) {}
  /// Constructs an optimizer of one group of parameters.
  template <class Group>
  ShardedOptimizer(std::vector<torch::Tensor> params, options_t defaults, const Group& group)
      : ShardedOptimizer(
            std::vector<torch::optim::OptimizerParamGroup>{
                torch::optim::OptimizerParamGroup(std::move(params))},
            std::move(defaults), group) {}

  /// Throws. Make a new optimizer with all parameters, and load the state of this one.
  void add_param_group(const torch::optim::OptimizerParamGroup&) { refuse_group(); }
  /// Resets the gradients of the model's parameters.
  void zero_grad(bool set_to_none = true) { zero_gradients(set_to_none); }

  /// Returns the state dict of the whole optimizer on every rank, equal to what the class alone
  /// would return. It loads into the class in C++ and Python, and into ShardedOptimizer on any
  /// number of ranks. Its tensors are on the CPU and share no memory with the optimizer.
  c10::impl::GenericDict state_dict() const override {
    return whole_state(Optimizer::state_dict());
  }
  /// Checks a state_dict() of the class, or of this one on any number of ranks; see FusedOptimizer.
  std::function<void()> prepare_state_dict(const c10::impl::GenericDict& state_dict) override {
    return Optimizer::prepare_state_dict(own_state(state_dict));
  }
  /// Writes the whole optimizer, as the class alone does. All ranks call it, each with an archive.
  void save(torch::serialize::OutputArchive& archive) const override {
    Optimizer whole = shape();
    whole.load_state_dict(state_dict());
    whole.save(archive);
  }
  /// Reads what the class alone, or this one on any number of ranks, wrote.
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
  /// Returns an optimizer of the model's parameters without their values.
  Optimizer shape() const {
    return Optimizer(shape_groups(this->param_groups()),
                     static_cast<const options_t&>(this->defaults()));
  }
};

}  // namespace torchfuse::parallel
