// SPDX-License-Identifier: BSD-3-Clause
// How processes find each other: torchrun's variables, the store, the barriers for joining and
// leaving a group, and the backends.
#pragma once

#include <torchfuse/parallel/process_group.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <string>

namespace torchfuse::parallel {

inline constexpr const char* kInit = "torchfuse::parallel::init_process_group";

/// Returns text such as "30 s" or "1500 ms".
std::string to_string(std::chrono::milliseconds duration);

/// A process's rank, and the number of processes.
struct RankInfo {
  std::int64_t rank;
  std::int64_t world_size;
  std::int64_t local_rank;  ///< rank among the processes on this machine
};

/// A store, and whether this process serves it.
struct Rendezvous {
  c10::intrusive_ptr<c10d::Store> store;
  bool serves;
};

/// Reads this process's rank from options or environment. Throws if a value is missing or out of
/// range.
RankInfo read_rank_info(const ProcessGroupOptions& options, bool read_environment);
/// Connects to the store of torchrun's agent, or to the store that rank 0 serves.
Rendezvous join_rendezvous(const ProcessGroupOptions& options, const RankInfo& self);

/// Waits until all ranks have joined through `store`, and checks that they pass equal `terms`.
void wait_for_all(c10d::Store& store, const RankInfo& self, std::chrono::milliseconds timeout,
                  const std::string& group, const std::string& terms);
/// Waits until all ranks are about to leave. After `timeout`, returns with a warning.
void leave_after_all_ranks(c10d::Store& store, const RankInfo& self,
                           std::chrono::milliseconds timeout, const std::string& group,
                           bool serves);

// Backends. Each has a separate source file, because its torch headers change often.

struct BackendArguments {
  c10::intrusive_ptr<c10d::Store> store;
  RankInfo self;
  std::chrono::milliseconds timeout;
  std::string name;
};

/// Connects to all other ranks before it returns.
void add_gloo(c10d::ProcessGroup& group, const BackendArguments& arguments);
/// Makes the local rank's GPU the current one; connects at the first collective.
void add_nccl(c10d::ProcessGroup& group, const BackendArguments& arguments);
/// Returns whether this build contains add_nccl.
bool has_nccl();

}  // namespace torchfuse::parallel
