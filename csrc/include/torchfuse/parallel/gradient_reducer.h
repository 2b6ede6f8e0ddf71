// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <torchfuse/export.h>

namespace torchfuse::parallel {

class Reducer;

/// Reduces gradients to each process's part of them while backward runs, for a model that is not in
/// a DistributedDataParallel. ShardedOptimizer does so with one that is, and Python's
/// ShardedOptimizer with `shard_gradients=True` uses this class.
///
///     using torchfuse::parallel::GradientReducer;
///     const auto members = GradientReducer::plan(params, 1 << 20, 25 << 20);
///     GradientReducer reducer(names, params, parts, members, group);
///     loss.backward();  // the parts have averages over the processes now, and params no gradients
///
/// The parameters of each bucket are imagined in one flat tensor, in the order of `members`, each
/// at a multiple of 16 bytes; of N processes the r-th keeps the r-th part of its elements. Parts
/// begin at multiples of 64 bytes. A part of a parameter without own elements is empty.
///
/// From the construction on, the first gradient of a backward() begins a reduction, and at the end
/// of that backward() the averages are added to the gradients of the parts. The gradients of the
/// parameters are reset, after all hooks of theirs. Backward must reach all parameters that require
/// gradients on all processes, at most once. The destructor removes the hooks.
///
/// backward() throws for parameters that get no gradient (unless `find_unused_parameters`), for
/// sparse gradients and other dtypes than the parameters', for a backward() within it, after a
/// backward() that an exception has ended, and if a process does not arrive within the group's
/// timeout.
class TORCHFUSE_API GradientReducer {
 public:
  /// Returns the members of buckets: indices of parameters in reverse order, those of each dtype
  /// and device apart, each bucket closed by the parameter that reaches its size.
  /// @param params dense parameters, in the model's order.
  /// @param first_bucket_bytes size of the bucket that is reduced first.
  /// @param bucket_bytes size of all others.
  static std::vector<std::vector<std::size_t>> plan(const std::vector<at::Tensor>& params,
                                                    std::int64_t first_bucket_bytes,
                                                    std::int64_t bucket_bytes);

  /// @param names of the parameters, for messages.
  /// @param params the same on all processes; those that require gradients are reduced.
  /// @param parts for each parameter a tensor of one dimension, with as many elements as this
  ///   process owns of it.
  /// @param members of each bucket, the same on all processes; plan() makes them.
  /// @param group the processes.
  /// @param find_unused_parameters accept parameters without a gradient, at the cost of one more
  ///   small collective. The part of one that no process used keeps the gradient it had, or none.
  ///   Backward then must not wait for other processes itself, as SyncBatchNorm does: a process may
  ///   wait in it for a bucket that others, without its parameters, reduce at the end of theirs.
  /// @param who begins messages.
  /// @throws c10::ValueError for lists of different lengths, for parameters with gaps in memory,
  ///   for members that are not each parameter once, and for parts of other numbers of elements or
  ///   dtypes.
  GradientReducer(std::vector<std::string> names, std::vector<at::Tensor> params,
                  std::vector<at::Tensor> parts,
                  const std::vector<std::vector<std::size_t>>& members,
                  c10::intrusive_ptr<c10d::ProcessGroup> group, bool find_unused_parameters = false,
                  const std::string& who = "torchfuse::parallel::GradientReducer");
  ~GradientReducer();
  /// Neither copyable nor movable.
  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;

  /// Chooses what the next backward() does, and all until the next call: true reduces, false leaves
  /// whole gradients of this process in the parameters, which the next reduction adds.
  /// @throws c10::Error after a backward() that an exception has ended.
  void set_sync(bool sync);
  /// Throws after a backward() that an exception has ended: the parts lack what it has reduced.
  void check_ended() const;

 private:
  std::shared_ptr<Reducer> reducer_;
};

}  // namespace torchfuse::parallel
