// SPDX-License-Identifier: BSD-3-Clause
// How processes find each other: torchrun's variables, the store, and who has come.
#pragma once

#include <torchfuse/parallel/process_group.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <exception>
#include <string>
#include <vector>

namespace torchfuse::parallel {

inline constexpr const char* kInit = "torchfuse::parallel::init_process_group";

/// What an exception says, without a backtrace.
std::string message_of(const std::exception& error);
/// "30 s", "1500 ms"
std::string to_string(std::chrono::milliseconds duration);
/// "rank 2", "ranks 1, 3"
std::string rank_list(const std::vector<std::int64_t>& ranks);

/// One process's place.
struct Seat {
  std::int64_t rank;
  std::int64_t world_size;
  std::int64_t local_rank;
};

/// A store, and whether this process serves it.
struct Meeting {
  c10::intrusive_ptr<c10d::Store> store;
  bool serves;
};

/// The place that options or environment give; throws if it is incomplete or impossible.
Seat take_seat(const ProcessGroupOptions& options, bool read_environment);
/// The store of torchrun's agent, or the one that rank 0 serves.
Meeting meet(const ProcessGroupOptions& options, const Seat& seat);

/// Returns once all ranks have come to `store`. Each brings `terms`, which must be equal.
void wait_for_all(c10d::Store& store, const Seat& seat, std::chrono::milliseconds timeout,
                  const std::string& group, const std::string& terms);
/// Returns once all ranks are about to leave, or after `timeout`, then with a warning.
void leave_together(c10d::Store& store, const Seat& seat, std::chrono::milliseconds timeout,
                    const std::string& group, bool serves);

}  // namespace torchfuse::parallel
