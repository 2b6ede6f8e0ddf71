// SPDX-License-Identifier: BSD-3-Clause
// The processes that save or load a checkpoint together.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "api/parallel/collectives.h"

namespace torchfuse::checkpoint {

/// The ranks of a group or, without a group, this process alone.
class Ranks {
 public:
  /// @param caller start of error messages.
  Ranks(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& caller);

  std::int64_t rank() const { return collectives_ ? collectives_->rank() : 0; }
  std::int64_t size() const { return collectives_ ? collectives_->size() : 1; }
  /// Returns each rank's bytes, in rank order. A collective.
  std::vector<std::string> gather(const std::string& mine) const;
  /// Calls `action` on every rank. If `action` throws on any rank, all ranks throw the error of the
  /// first such rank. A collective.
  void all_or_none(const std::function<void()>& action) const;

 private:
  std::optional<parallel::Collectives> collectives_;
};

}  // namespace torchfuse::checkpoint
