// SPDX-License-Identifier: BSD-3-Clause
// What the ranks of a group tell each other about a checkpoint.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace torchfuse::checkpoint {

/// The processes that save and load together; without a group, this process alone.
class Ranks {
 public:
  Ranks(c10::intrusive_ptr<c10d::ProcessGroup> group, std::string caller);

  std::int64_t rank() const;
  std::int64_t size() const;
  /// Each rank's bytes, in the order of ranks. All ranks must call it.
  std::vector<std::string> gather(const std::string& mine) const;
  /// Throws the first rank's error in all ranks if any rank has one; empty: none.
  void agree(const std::string& error) const;
  /// Calls `action` in every rank, and throws the first rank's error in all ranks if it fails in
  /// any. All ranks must call it.
  void all_or_none(const std::function<void()>& action) const;
  /// Within which collectives of the group must end; none: there is no group, or it does not say.
  std::optional<std::chrono::milliseconds> timeout() const;
  /// Begins messages.
  const std::string& caller() const { return caller_; }

 private:
  /// Where the group's collectives take tensors.
  at::DeviceType device() const;

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::string caller_;
};

}  // namespace torchfuse::checkpoint
