// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/arg.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torchfuse/export.h>
#include <torchfuse/parallel/process_group.h>

namespace torchfuse::parallel {

/// Options of DistributedDataParallel.
struct DistributedDataParallelOptions {
  /// Size in bytes of the bucket that is reduced first; small, so that communication starts early.
  TORCH_ARG(std::int64_t, first_bucket_bytes) = std::int64_t{1} << 20;
  /// Size in bytes of all other buckets. The parameter that reaches the size closes the bucket.
  TORCH_ARG(std::int64_t, bucket_bytes) = std::int64_t{25} << 20;
  /// Accept parameters without a gradient, at the cost of one more small collective. A parameter
  /// that no rank used keeps the old gradient, or none.
  TORCH_ARG(bool, find_unused_parameters) = false;
  /// Broadcast rank 0's buffers at the start of each forward() that records gradients, except in
  /// no_sync() or while an earlier forward() still waits for backward().
  TORCH_ARG(bool, broadcast_buffers) = true;
  /// Returns true for modules whose own buffers are broadcast at construction only, such as
  /// SyncBatchNorm, whose buffers are equal on all ranks anyway. Empty: no such module.
  TORCH_ARG(std::function<bool(const torch::nn::Module&)>, keeps_buffers);
};

/// Keeps gradients local until the scope ends; returned by DataParallelBase::no_sync().
class TORCHFUSE_API NoSync {
 public:
  ~NoSync();
  /// Neither copyable nor movable, because the guard ends with its scope.
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  friend class DataParallelBase;
  NoSync(std::shared_ptr<bool> sync, bool local);
  std::shared_ptr<bool> sync_;
  bool before_;
};

/// Base class of DistributedDataParallel, independent of the module's type.
class TORCHFUSE_API DataParallelBase {
 public:
  ~DataParallelBase();
  /// Movable, not copyable.
  DataParallelBase(DataParallelBase&&) noexcept;
  /// Movable, not copyable.
  DataParallelBase& operator=(DataParallelBase&&) noexcept;
  DataParallelBase(const DataParallelBase&) = delete;
  DataParallelBase& operator=(const DataParallelBase&) = delete;

  /// Skips the reduction, for gradient accumulation. The backward() of a forward() inside the
  /// guard's scope reduces nothing. The next backward() of a forward() outside the scope reduces
  /// the accumulated gradients. Only the place of the forward() matters.
  ///
  ///     for (int part = 0; part < kParts; ++part) {
  ///       const auto local = model.no_sync(part + 1 < kParts);  // the last one averages all
  ///       (model.forward(inputs[part]).sum() / kParts).backward();
  ///     }
  ///     optimizer.step();
  ///
  /// @param local false: the guard changes nothing, so one loop body serves all iterations; inside
  ///   another guard's scope, gradients stay local (default true).
  [[nodiscard]] NoSync no_sync(bool local = true);
  /// Copies rank 0's buffers to all ranks, before evaluation or checkpoints there. A collective.
  void sync_buffers();
  /// Returns the parameters' names in each bucket, in the order in which buckets are reduced.
  std::vector<std::vector<std::string>> buckets() const;

 protected:
  /// Makes all ranks' modules identical; see DistributedDataParallel.
  DataParallelBase(const torch::nn::Module& module,
                   const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                   const DistributedDataParallelOptions& options);
  void before_forward();  ///< must be called before each forward() of the module

 private:
  struct Replica;
  Replica& replica() const;
  std::unique_ptr<Replica> replica_;
};

/// Trains copies of a module on several processes, each on its share of the batch. Gradients are
/// averaged over a process group while backward runs. See docs/several_processes.md.
///
///     Net net;
///     torchfuse::parallel::DistributedDataParallel model(net, group);
///     torchfuse::optim::FusedAdam optimizer(net->parameters());
///     for (auto& batch : *loader) {
///       optimizer.zero_grad();
///       loss_of(model.forward(batch.data), batch.target).backward();
///       optimizer.step();
///     }
///
/// The constructor checks that all ranks have the same parameters and buffers, by name, shape and
/// dtype, and copies rank 0's values to all ranks. The module must already be on the final device,
/// and parameters must keep shape, dtype and device. The caller still owns the module: save, load
/// and evaluate the module, not the wrapper.
///
/// Gradients are views into buckets; each dtype and device has a separate list of buckets. If a
/// gradient was replaced by another tensor, as after `zero_grad()`, that tensor is copied into the
/// bucket when backward reaches the parameter, and a view replaces that tensor. Other references to
/// the old tensor do not see the average. All ranks reduce buckets in one order, each as soon as it
/// is complete. After the first backward, buckets are rebuilt in the order in which rank 0's
/// gradients arrived.
///
/// backward() throws without a preceding forward() on the wrapper, if a parameter gets no gradient
/// (unless `find_unused_parameters`), if backward reaches a parameter twice, for sparse gradients,
/// and if a rank does not arrive within the group's timeout. `create_graph` is not supported,
/// because averages have no graph.
///
/// @tparam Module a class derived from torch::nn::Module with a `forward` function.
template <class Module>
class DistributedDataParallel : public DataParallelBase {
 public:
  /// @param module a module with the same parameters and buffers on all ranks.
  /// @param group group whose ranks train together; must outlive the wrapper.
  /// @param options see DistributedDataParallelOptions.
  /// @throws c10::ValueError if an option is out of range, if no parameter requires gradients, or
  ///   if modules differ between ranks.
  DistributedDataParallel(std::shared_ptr<Module> module, const ProcessGroup& group,
                          const DistributedDataParallelOptions& options = {})
      : DistributedDataParallel(std::move(module), group.get(), options) {}
  /// Constructs from a c10d process group.
  DistributedDataParallel(std::shared_ptr<Module> module,
                          const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                          const DistributedDataParallelOptions& options = {})
      : DataParallelBase(*module, group, options), module_(std::move(module)) {}
  /// Constructs from a module holder, as defined by TORCH_MODULE.
  template <class Group>
  DistributedDataParallel(const torch::nn::ModuleHolder<Module>& module, const Group& group,
                          const DistributedDataParallelOptions& options = {})
      : DistributedDataParallel(module.ptr(), group, options) {}

  /// Calls the module's forward(); backward() on the result averages the gradients.
  template <class... Args>
  decltype(auto) forward(Args&&... args) {
    before_forward();
    return module_->forward(std::forward<Args>(args)...);
  }
  /// Calls forward().
  template <class... Args>
  decltype(auto) operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }
  /// Returns the module that was passed to the constructor.
  const std::shared_ptr<Module>& module() const { return module_; }

 private:
  std::shared_ptr<Module> module_;
};

/// Deduces the module's type from a module holder.
template <class Module, class Group>
DistributedDataParallel(const torch::nn::ModuleHolder<Module>&, const Group&,
                        const DistributedDataParallelOptions& = {})
    -> DistributedDataParallel<Module>;

}  // namespace torchfuse::parallel
