// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Dict.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torchfuse/export.h>
#include <torchfuse/optim/fused_optimizer.h>
#include <torchfuse/parallel/distributed_data_parallel.h>
#include <torchfuse/parallel/process_group.h>

namespace torchfuse::parallel {

struct BucketSizes;
class Shards;

/// Modules that wait for their parameters, in the order in which they run.
using GatherModules = std::vector<std::shared_ptr<torch::nn::Module>>;

/// The part of ShardedOptimizer that does not depend on the optimizer's class.
class TORCHFUSE_API ShardedBase {
 protected:
  /// Checks what `whole` is given, on all ranks, and moves its parameters into flat memory.
  ShardedBase(const torchfuse::optim::FusedOptimizer& whole,
              const c10::intrusive_ptr<c10d::ProcessGroup>& group,
              const GatherModules& gather_in_forward);
  /// The same in the model's group, whose gradients it takes over.
  ShardedBase(const torchfuse::optim::FusedOptimizer& whole, DataParallelBase& model,
              const GatherModules& gather_in_forward);
  ~ShardedBase();
  /// Movable, not copyable.
  ShardedBase(ShardedBase&&) noexcept;
  /// Movable, not copyable.
  ShardedBase& operator=(ShardedBase&&) noexcept;

  /// Returns the groups with this process's parts of their parameters.
  std::vector<torch::optim::OptimizerParamGroup> part_groups(
      const std::vector<torch::optim::OptimizerParamGroup>& whole) const;
  /// Returns the groups with the shapes of the model's parameters, in memory that is never used.
  std::vector<torch::optim::OptimizerParamGroup> shape_groups(
      const std::vector<torch::optim::OptimizerParamGroup>& parts) const;
  /// What the optimizer's class itself does: with parts, not with whole parameters.
  struct States {
    /// As state_dict().
    std::function<c10::impl::GenericDict(const torchfuse::optim::FusedOptimizer&)> state_dict;
    /// As prepare_state_dict().
    std::function<std::function<void()>(torchfuse::optim::FusedOptimizer&,
                                        const c10::impl::GenericDict&)>
        prepare_state_dict;
  };
  /// Makes the optimizer of the parts one of this process among others.
  void attach(torchfuse::optim::FusedOptimizer& of_parts, States states) const;
  /// Resets the gradients of the model's parameters.
  void zero_gradients(bool set_to_none) const;
  /// Waits for all parameters that are under way.
  void finish_gather() const;
  /// Waits for those of a module.
  void finish_gather(const torch::nn::Module& module) const;
  /// Returns the model's parameters, in the order of the groups.
  const std::vector<at::Tensor>& model_parameters() const;
  /// Returns the state dict of whole parameters; a collective.
  c10::impl::GenericDict whole_state(const c10::impl::GenericDict& of_parts) const;
  /// Returns this process's part of a state dict of whole parameters.
  c10::impl::GenericDict own_state(const c10::impl::GenericDict& whole) const;

 private:
  /// What cannot be split of an optimizer; empty: nothing.
  static std::string refusal(const torchfuse::optim::FusedOptimizer& whole);
  static std::string refusal(const torchfuse::optim::FusedOptimizer& whole,
                             const DataParallelBase& model);
  ShardedBase(const torchfuse::optim::FusedOptimizer& whole,
              const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& refused,
              const GatherModules& modules, std::optional<BucketSizes> scattered);
  Shards& shards() const;
  std::shared_ptr<Shards> shards_;
};

/// Splits the states and the step of a fused optimizer over the processes of a group: stages 1 and
/// 2 of ZeRO (Rajbhandari et al. 2020). All processes have all parameters. Of N processes each
/// keeps the states of an N-th of the elements, updates these, and receives the others in one
/// all-gather for each dtype, in the dtype of the model. See docs/data_parallel.md.
///
///     torchfuse::parallel::DistributedDataParallel model(net, group);
///     torchfuse::parallel::ShardedOptimizer<torchfuse::optim::FusedAdam> optimizer(
///         net->parameters(), torchfuse::optim::FusedAdamOptions(1e-3).max_grad_norm(1.0), model);
///
/// The last argument says which gradients there are:
///
/// - a group (stage 1): gradients of the model, whole and equal in all processes, as
///   DistributedDataParallel leaves them.
/// - a DistributedDataParallel (stage 2): it reduces each bucket of gradients to the processes'
///   parts while backward runs, and frees the bucket. Each process keeps an N-th of the gradients;
///   the model's parameters have none, `param_groups()` has the parts'. Each backward() adds to
///   them until step() uses them up or zero_grad() of this object resets them; zero_grad() of the
///   model does not. Within no_sync(), backward() leaves whole gradients in the parameters instead,
///   at the cost of their memory, and sends nothing.
///
/// What is computed for an element is what the class would compute alone: bit for bit, except that
/// norms over all elements (clipping, LAMB, LARS, NovoGrad) are sums over the processes.
///
/// It is an optimizer of its class, over this process's parts: `param_groups()` have views of one
/// dimension, and the options of the step. Schedulers, amp::GradScaler, EmaWeights and Checkpoint
/// accept it; a Checkpoint needs the group, and save_sharded_checkpoint() writes a file for each
/// process. The parameters of the model become views of flat memory
/// and have to stay there: move and convert the model before, and load it in place. With a group,
/// call zero_grad() of this class or of the model, not of a base class.
///
/// With `gather_in_forward` the parameters of these modules arrive while earlier ones compute.
/// Modules of LibTorch have no hooks, so the forward pass says when it needs them, with
/// finish_gather(module):
///
///     GatherModules blocks = net->blocks->children();
///     ShardedOptimizer<FusedAdam> optimizer(net->parameters(), FusedAdamOptions(1e-3), model,
///                                           blocks);
///     net->before_block = [&](const torch::nn::Module& block) { optimizer.finish_gather(block); };
///
/// What no module waits for arrives within step(), and so do the parameters of a module that has
/// not waited since the last one. Until then nothing else may use the module's parameters or write
/// to them: call finish_gather() before torch::save(), a copy of the model, or loading it in place.
/// Steps, EmaWeights, AveragedModel, Checkpoint, save_weights() and load_weights() wait by
/// themselves, and so does the end of the optimizer. Copies of the modules wait for nothing.
/// A gather that failed fails again, but in loading: load the model, and make another optimizer
/// when this one is gone. What calls finish_gather(module) must not outlive the optimizer.
///
/// step(), EmaWeights, swap_ema_(), state_dict(), save() and load() are collectives: all ranks must
/// call them. finish_gather() is none.
///
/// @tparam Optimizer a class of torchfuse::optim, such as FusedAdam.
template <class Optimizer>
class ShardedOptimizer : private ShardedBase, public Optimizer {
 public:
  using options_t = typename Optimizer::options_t;  ///< the options of the class

  /// @param param_groups groups of the model's parameters, the same on all ranks, with the values
  ///   that rank 0 has. Groups without options of their own get `defaults`.
  /// @param defaults hyper-parameters, and the optimizer-wide options.
  /// @param group the processes that the states are split over; it must outlive this object.
  /// @param gather_in_forward modules that wait for their parameters, in the order in which they
  ///   run; the same on all ranks. Default: none, and everything arrives in step().
  /// @throws c10::Error for options out of range; for write_back_grads; for
  ///   parameters with gaps or listed twice; for modules without parameters of the groups; and if
  ///   parameters, options or modules differ between ranks. All ranks throw the same, and nothing
  ///   has been changed.
  ShardedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                   options_t defaults, const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                   const GatherModules& gather_in_forward = {})
      : ShardedOptimizer(Optimizer(param_groups, std::move(defaults)), group, gather_in_forward) {}
  /// Constructs it with a group of init_process_group().
  ShardedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                   options_t defaults, const ProcessGroup& group,
                   const GatherModules& gather_in_forward = {})
      : ShardedOptimizer(param_groups, std::move(defaults), group.get(), gather_in_forward) {}
  /// Constructs it with a model, whose gradients are split too from then on. It must outlive the
  /// model's training, or another one take its place.
  /// @param param_groups, defaults as above.
  /// @param model has all parameters of the groups, and no others that require gradients.
  /// @param gather_in_forward as above. Parameters travel by the model's buckets: those of a bucket
  ///   that has parameters of no module arrive in step().
  /// @throws c10::Error as above, and for other parameters.
  ShardedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                   options_t defaults, DataParallelBase& model,
                   const GatherModules& gather_in_forward = {})
      : ShardedOptimizer(Optimizer(param_groups, std::move(defaults)), model, gather_in_forward) {}
  /// Constructs an optimizer of one group of parameters, with a group or a model.
  template <class GroupOrModel>
  ShardedOptimizer(std::vector<torch::Tensor> params, options_t defaults, GroupOrModel&& shared,
                   const GatherModules& gather_in_forward = {})
      : ShardedOptimizer(
            std::vector<torch::optim::OptimizerParamGroup>{
                torch::optim::OptimizerParamGroup(std::move(params))},
            std::move(defaults), std::forward<GroupOrModel>(shared), gather_in_forward) {}

  /// Waits for what modules of `gather_in_forward` have not waited for.
  /// @throws c10::Error naming the gather and the missing ranks, if one does not arrive within the
  ///   group's timeout.
  void finish_gather() { ShardedBase::finish_gather(); }
  /// Waits for the parameters of one of these modules: call it before its forward pass.
  /// @throws c10::Error as above, and for a module that is none of them.
  void finish_gather(const torch::nn::Module& module) { ShardedBase::finish_gather(module); }
  /// Resets the gradients of the model's parameters.
  void zero_grad(bool set_to_none = true) { zero_gradients(set_to_none); }
  /// Returns the model's parameters, in the order of the groups.
  const std::vector<torch::Tensor>& model_parameters() const {
    return ShardedBase::model_parameters();
  }

  /// Returns the state dict of the whole optimizer, on every rank: what the class alone would
  /// return, so that it loads into that class and into this one on any number of ranks, in C++ and
  /// in Python. Its tensors are on the CPU and share no memory with the optimizer.
  c10::impl::GenericDict state_dict() const override {
    return whole_state(Optimizer::state_dict());
  }
  /// Checks a state_dict() of the class, or of this one on any number of ranks; see FusedOptimizer.
  std::function<void()> prepare_state_dict(const c10::impl::GenericDict& state_dict) override {
    return Optimizer::prepare_state_dict(own_state(state_dict));
  }
  /// Writes the whole optimizer, as the class alone does; all ranks call it, each with an archive.
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
  template <class GroupOrModel>
  ShardedOptimizer(const Optimizer& whole, GroupOrModel&& shared,
                   const GatherModules& gather_in_forward)
      : ShardedBase(whole, std::forward<GroupOrModel>(shared), gather_in_forward),
        Optimizer(part_groups(whole.param_groups()),
                  static_cast<const options_t&>(whole.defaults())) {
    using Base = torchfuse::optim::FusedOptimizer;
    attach(*this,
           {[](const Base& own) {
              return static_cast<const ShardedOptimizer&>(own).Optimizer::state_dict();
            },
            [](Base& own, const c10::impl::GenericDict& state_dict) {
              return static_cast<ShardedOptimizer&>(own).Optimizer::prepare_state_dict(state_dict);
            }});
  }
  /// An optimizer of the model's parameters without their values.
  Optimizer shape() const {
    return Optimizer(shape_groups(this->param_groups()),
                     static_cast<const options_t&>(this->defaults()));
  }
};

}  // namespace torchfuse::parallel
