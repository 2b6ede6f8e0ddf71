// SPDX-License-Identifier: BSD-3-Clause
// The parameter groups that a launch carries by value.
#pragma once

#include <cstdint>

namespace torchfuse::kernels::cuda {

/// Parameter groups per launch: some 6 KB of hyper-parameters.
template <class Params>
constexpr int kMaxGroups = 6144 / static_cast<int>(sizeof(Params));

/// Which groups stand where in a launch's array of kMaxGroups.
template <class Params>
class GroupSlots {
 public:
  static_assert(kMaxGroups<Params> >= 1 && kMaxGroups<Params> <= 255);

  void reset() {
    count_ = 0;
    last_ = 0;
  }

  /// The place of `group`, entered into `launch_groups` if it is new; negative without room.
  int place(const Params* groups, std::int32_t group, Params* launch_groups) {
    if (last_ < count_ && ids_[last_] == group) return last_;
    for (last_ = 0; last_ < count_; ++last_) {
      if (ids_[last_] == group) return last_;
    }
    if (count_ == kMaxGroups<Params>) return -1;
    launch_groups[count_] = groups[group];
    ids_[count_] = group;
    return count_++;
  }

 private:
  std::int32_t ids_[kMaxGroups<Params>] = {};
  int count_ = 0;
  int last_ = 0;
};

}  // namespace torchfuse::kernels::cuda
