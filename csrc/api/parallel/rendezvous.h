// SPDX-License-Identifier: BSD-3-Clause
// How processes find each other: torchrun's variables, the store, and the barriers at a group's
// begin and end.
#pragma once

#include <torchfuse/parallel/process_group.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <string>

namespace torchfuse::parallel {

inline constexpr const char* kInit = "torchfuse::parallel::init_process_group";

/// "30 s", "1500 ms"
std::string to_string(std::chrono::milliseconds duration);

/// One process's rank, and what it counts among.
struct RankInfo {
  std::int64_t rank;
  std::int64_t world_size;
  std::int64_t local_rank;  ///< among the processes of its machine
};

/// A store, and whether this process serves it.
struct Rendezvous {
  c10::intrusive_ptr<c10d::Store> store;
  bool serves;
};

/// What options or environment say of this process; throws if it is incomplete or impossible.
RankInfo read_rank_info(const ProcessGroupOptions& options, bool read_environment);
/// The store of torchrun's agent, or the one that rank 0 serves.
Rendezvous join_rendezvous(const ProcessGroupOptions& options, const RankInfo& self);

/// Returns once all ranks have come to `store`. Each brings `terms`, which must be equal.
void wait_for_all(c10d::Store& store, const RankInfo& self, std::chrono::milliseconds timeout,
                  const std::string& group, const std::string& terms);
/// Returns once all ranks are about to leave, or after `timeout`, then with a warning.
void leave_together(c10d::Store& store, const RankInfo& self, std::chrono::milliseconds timeout,
                    const std::string& group, bool serves);

}  // namespace torchfuse::parallel
