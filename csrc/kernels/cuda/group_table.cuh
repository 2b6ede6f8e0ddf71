// SPDX-License-Identifier: BSD-3-Clause
// Parameter groups that a launch passes by value, and a class that fills launches with rows.
#pragma once

#include <cstdint>

#include "kernels/common/status.h"
#include "kernels/cuda/launch.cuh"

namespace torchfuse::kernels::cuda {

/// Maximum parameter groups per launch: 6,144 bytes of hyper-parameters, or 640 in a short launch.
template <class Params, std::size_t kArgumentBytes = kMaxArgumentBytes>
constexpr int kMaxGroups =
    static_cast<int>((kArgumentBytes == kMaxArgumentBytes ? 6144 : 640) / sizeof(Params));

/// Maps group ids to places in a launch's array of kCapacity groups.
template <class Params, int kCapacity>
class GroupTable {
 public:
  static_assert(kCapacity >= 1 && kCapacity <= 255);

  void reset() {
    count_ = 0;
    last_ = 0;
  }

  /// Returns the group's place, and copies a new group to `launch_groups`. Returns a negative value
  /// if there is no room.
  int place(const Params* groups, std::int32_t group, Params* launch_groups) {
    if (last_ < count_ && ids_[last_] == group) return last_;
    for (last_ = 0; last_ < count_; ++last_) {
      if (ids_[last_] == group) return last_;
    }
    if (count_ == kCapacity) return -1;
    launch_groups[count_] = groups[group];
    ids_[count_] = group;
    return count_++;
  }

 private:
  std::int32_t ids_[kCapacity] = {};
  int count_ = 0;
  int last_ = 0;
};

/// Fills `launch` with rows and groups. When there is no more room for either, `enqueue(launch)`
/// starts the kernel, and the next launch begins.
template <class Launch, class Enqueue>
class LaunchFiller {
  using Params = typename Launch::Params;

 public:
  LaunchFiller(Launch& launch, const Params* groups, Enqueue enqueue)
      : launch_(launch), groups_(groups), enqueue_(enqueue) {
    launch_.reset();
  }

  template <class Row>
  Status add(const Row& row, std::int32_t group, std::uint32_t head = 0) {
    int place = launch_.full() ? -1 : table_.place(groups_, group, launch_.groups);
    if (place < 0) {
      const Status status = flush();
      if (!status.ok()) return status;
      place = table_.place(groups_, group, launch_.groups);
    }
    launch_.append(row, static_cast<std::uint8_t>(place), static_cast<std::uint8_t>(head));
    return Status{};
  }

  /// Starts the kernel for the last rows, if there are any.
  Status flush() {
    if (launch_.count() == 0) return Status{};
    const Status status = enqueue_(launch_);
    launch_.reset();
    table_.reset();
    return status;
  }

 private:
  Launch& launch_;
  const Params* groups_;
  Enqueue enqueue_;
  GroupTable<Params, Launch::kGroups> table_;
};

}  // namespace torchfuse::kernels::cuda
