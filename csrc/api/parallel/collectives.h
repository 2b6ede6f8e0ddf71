// SPDX-License-Identifier: BSD-3-Clause
// The collectives of data parallelism, on a group's backends, with errors that name the group.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

namespace torchfuse::parallel {

inline constexpr const char* kDataParallel = "torchfuse::parallel::DistributedDataParallel";

/// Until the current stream, or on the CPU the caller, may use the results. A backend that has
/// nothing left to wait for may give no Work.
void wait_for(const c10::intrusive_ptr<c10d::Work>& work);

using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

/// Waits for all of them, since what has begun writes, and returns what the first failure threw.
std::exception_ptr first_error_of(const Works& works);
/// Whether none is under way any more.
bool have_ended(const Works& works);

/// A collective under way. It may consist of several messages.
struct Pending {
  Works works;
  std::string what;  ///< for messages
};

/// A reduce-scatter under way. It holds all memory that the backend reads and writes.
struct PendingParts {
  Works works;
  at::Tensor flat;
  at::Tensor own;       ///< this rank's part of the result, once it is complete
  at::Tensor received;  ///< the other ranks' numbers for it, where they are added here
  std::string what;     ///< for messages
};

class Collectives {
 public:
  /// @param who is named first in messages.
  explicit Collectives(c10::intrusive_ptr<c10d::ProcessGroup> group,
                       std::string who = kDataParallel);

  /// Begins messages.
  const std::string& who() const { return who_; }
  std::int64_t rank() const { return group_->getRank(); }
  std::int64_t size() const { return group_->getSize(); }
  const std::string& name() const { return name_; }
  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const { return group_; }

  /// Whether the backend of `device` averages by itself; else it sums.
  bool averages(const c10::Device& device) const;
  /// Starts an all-reduce of a dense tensor in place.
  Pending start_all_reduce(const at::Tensor& tensor, c10d::ReduceOp::RedOpType operation,
                           std::string what) const;
  /// Until the current stream, or on the CPU the caller, may use the result. Nothing under way is
  /// nothing to wait for.
  void wait(Pending& pending) const;

  /// Starts to reduce a flat tensor to each rank's part of it. On the CPU the parts are sent to
  /// their owners, which add them: Gloo's reduce-scatter takes two to three times as long.
  /// @param tag differs between those that are under way at the same time.
  PendingParts start_reduce_scatter(const at::Tensor& flat, c10d::ReduceOp::RedOpType operation,
                                    std::int64_t tag, std::string what) const;
  /// Completes it, returns this rank's part and releases the flat tensor.
  at::Tensor wait(PendingParts& pending) const;

  /// Whether all ranks have the same number; `device` is one that the group sends from.
  bool agree(const c10::Device& device, std::int64_t number, const std::string& what) const;
  void sum(const at::Tensor& tensor, std::string what) const;
  /// Rank 0's values, for any dtype: the bytes travel.
  void broadcast(const at::Tensor& tensor, const std::string& what) const;
  /// The same for many tensors, packed.
  void broadcast_all(const std::vector<at::Tensor>& tensors, const std::string& what) const;
  /// Starts to bring all ranks' parts of a flat tensor to all, for any dtype. `own` may be this
  /// rank's part of it. On the CPU all parts are broadcast at the same time: Gloo's all-gather
  /// takes three times as long.
  Pending start_all_gather(const at::Tensor& flat, const at::Tensor& own, std::string what) const;
  void all_gather(const at::Tensor& flat, const at::Tensor& own, std::string what) const;
  /// Whether tensors on the CPU can be exchanged.
  bool has_cpu() const;

 private:
  c10::intrusive_ptr<c10d::Backend> backend(const c10::Device& device) const;
  [[noreturn]] void fail(const std::string& what, const std::exception& error) const;

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::string who_;
  std::string name_;
};

}  // namespace torchfuse::parallel
