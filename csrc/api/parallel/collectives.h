// SPDX-License-Identifier: BSD-3-Clause
// Collectives for data parallelism, and checks that all ranks are about to do the same. Errors name
// the group.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace torchfuse::parallel {

/// Makes the current stream (on the CPU, the caller) wait until the results are ready. `work` may
/// be null: a backend that has already finished may return no Work.
void wait_for(const c10::intrusive_ptr<c10d::Work>& work);

/// A collective in progress.
struct Pending {
  c10::intrusive_ptr<c10d::Work> work;
  std::string what;  ///< names the collective in error messages
};

class Collectives {
 public:
  /// @param who start of error messages.
  Collectives(c10::intrusive_ptr<c10d::ProcessGroup> group, std::string who);

  /// Start of error messages.
  const std::string& who() const { return who_; }
  std::int64_t rank() const { return group_->getRank(); }
  std::int64_t size() const { return group_->getSize(); }
  const std::string& name() const { return name_; }

  /// Returns whether the backend for `device` supports averaging; otherwise it only sums.
  bool averages(const c10::Device& device) const;
  /// Starts an all-reduce of a dense tensor in place.
  Pending start_all_reduce(const at::Tensor& tensor, c10d::ReduceOp::RedOpType operation,
                           std::string what) const;
  /// Makes the current stream (on the CPU, the caller) wait until the result is ready. Does nothing
  /// if no collective is pending.
  void wait(Pending& pending) const;

  /// Returns whether all ranks pass the same number.
  /// @param device a device from which the group can send.
  bool agree(const c10::Device& device, std::int64_t number, const std::string& what) const;
  void sum(const at::Tensor& tensor, std::string what) const;
  /// Copies rank `root`'s values to all ranks, for any dtype, because bytes are sent.
  void broadcast(const at::Tensor& tensor, const std::string& what, std::int64_t root = 0) const;
  /// Broadcasts many tensors from rank 0, packed into few collectives.
  void broadcast_all(const std::vector<at::Tensor>& tensors, const std::string& what) const;
  /// Gathers equal shards from all ranks into `flat`, for any dtype. `own` may be a view of this
  /// rank's shard in `flat`.
  void all_gather(const at::Tensor& flat, const at::Tensor& own, const std::string& what) const;
  /// Returns whether the group can send tensors on the CPU.
  bool has_cpu() const;

 private:
  c10::intrusive_ptr<c10d::Backend> backend(const c10::Device& device) const;
  /// Calls `action`, a step of the collective `what`. Errors name the collective and the missing
  /// ranks.
  template <class Action>
  auto named(const std::string& what, const Action& action) const;

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::string who_;
  std::string name_;
};

/// Returns each rank's text, in rank order. A collective.
/// @param device a device from which the group can send.
/// @param what names the collective in error messages.
std::vector<std::string> gather_texts(const Collectives& collectives, const c10::Device& device,
                                      const std::string& mine, const std::string& what);

/// Throws the same error on all ranks if any rank's summary differs from rank 0's. A collective:
/// all ranks send a checksum, and send lines only if checksums differ.
///
/// @param device a device from which the group can send.
/// @param expected subject of the error message: "the parameters".
/// @param summary must differ whenever the lines differ.
/// @param lines description for the error message, one entry per line.
void check_agreement(const Collectives& collectives, const c10::Device& device,
                     const char* expected, const std::string& summary,
                     const std::function<std::vector<std::string>()>& lines);

}  // namespace torchfuse::parallel
