// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/arg.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torchfuse/export.h>

namespace torchfuse::parallel {

/// Options of init_process_group(). Omitted values are read from torchrun's environment variables.
struct ProcessGroupOptions {
  /// "gloo" or "nccl"; `nullopt` (default) means nccl if the build supports NCCL and torch finds a
  /// GPU, otherwise gloo.
  TORCH_ARG(std::optional<std::string>, backend);
  /// Timeout for joining and for every collective.
  TORCH_ARG(std::chrono::milliseconds, timeout) = std::chrono::minutes(10);
  /// How long a process that leaves the group waits for the other processes to leave.
  TORCH_ARG(std::chrono::milliseconds, leave_timeout) = std::chrono::seconds(10);
  TORCH_ARG(std::optional<std::int64_t>, rank);         ///< replaces RANK
  TORCH_ARG(std::optional<std::int64_t>, world_size);   ///< replaces WORLD_SIZE
  TORCH_ARG(std::optional<std::int64_t>, local_rank);   ///< replaces LOCAL_RANK; falls back to rank
  TORCH_ARG(std::optional<std::string>, master_addr);   ///< replaces MASTER_ADDR
  TORCH_ARG(std::optional<std::int64_t>, master_port);  ///< replaces MASTER_PORT
  /// Registered name, and prefix for the group's keys in the store.
  TORCH_ARG(std::string, name) = "torchfuse";
};

/// Owns a c10d process group. The group stays registered by name until close() or destruction:
/// torchfuse::all_reduce_, `amp::GradScalerOptions().process_group(name)` and torch's functional
/// collectives find the group by name.
///
/// The destructor and close() first close the groups made by new_group(). Leaving then waits until
/// all ranks are about to leave (up to ProcessGroupOptions::leave_timeout), unregisters the name,
/// shuts the backend down and releases the store. While an exception unwinds the stack, leaving
/// does not wait, and aborts the backend. Movable, not copyable.
class TORCHFUSE_API ProcessGroup {
 public:
  ~ProcessGroup();
  /// Movable, not copyable.
  ProcessGroup(ProcessGroup&& other) noexcept;
  /// Movable, not copyable. Closes the previously owned group.
  ProcessGroup& operator=(ProcessGroup&& other) noexcept;
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;

  std::int64_t rank() const;                  ///< rank in the group
  std::int64_t world_size() const;            ///< number of processes in the group
  std::int64_t local_rank() const;            ///< rank on the machine: index of the GPU to use
  const std::string& name() const;            ///< name under which the group is registered
  const std::string& backend() const;         ///< "gloo" or "nccl"
  std::chrono::milliseconds timeout() const;  ///< timeout of every collective
  bool is_open() const noexcept;              ///< false after close() here or on the parent group
  /// Returns the c10d group, for torch's functions.
  const c10::intrusive_ptr<c10d::ProcessGroup>& get() const;

  /// Makes a group from a subset of processes, with new connections. All processes in the parent
  /// group must call new_group() with equal `ranks`, in the same order.
  /// @param ranks ranks within the parent group, without duplicates. The list is sorted, and the
  ///   index in the sorted list becomes the rank in the new group.
  /// @return the new group; `nullopt` in a process that is not in `ranks`.
  /// @throws c10::ValueError for ranks that are empty, duplicate or not in the parent group.
  std::optional<ProcessGroup> new_group(std::vector<std::int64_t> ranks);

  /// Waits until all processes in the group have called barrier().
  /// @throws c10::Error after the timeout, naming the group.
  void barrier();
  /// Leaves the group, as described for the destructor. A second call does nothing.
  void close();

 private:
  struct State;
  explicit ProcessGroup(std::shared_ptr<State> state);
  friend TORCHFUSE_API ProcessGroup init_process_group(c10::intrusive_ptr<c10d::Store> store,
                                                       const ProcessGroupOptions& options);
  friend TORCHFUSE_API ProcessGroup init_process_group(const ProcessGroupOptions& options);
  State& state() const;
  std::shared_ptr<State> state_;
};

/// Joins the group of all processes that torchrun started. Each process calls init_process_group()
/// once.
///
///     // torchrun --no-python --nproc-per-node 2 ./program
///     auto group = torchfuse::parallel::init_process_group();
///
/// Reads RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, LOCAL_RANK, TORCHELASTIC_USE_AGENT_STORE and
/// TORCHELASTIC_RESTART_COUNT. Without torchrun, rank 0 serves the store at
/// `MASTER_ADDR:MASTER_PORT`.
///
/// @param options values that replace environment variables (default: none).
/// @throws c10::ValueError naming the variable or option that is missing or out of range, and for a
///   backend that is unknown or not part of this build.
/// @throws c10::Error within the timeout if the port is in use or does not answer, and if a rank
///   does not join, joins twice or was started with another world size.
[[nodiscard]] TORCHFUSE_API ProcessGroup
init_process_group(const ProcessGroupOptions& options = {});

/// Joins a group through the caller's store, with keys that start with the group's name. Reads no
/// environment variables: `rank` and `world_size` must be given.
/// @param store store that all processes of the group share.
/// @param options rank, world size and other options.
/// @throws c10::ValueError and c10::Error as in the first overload, and c10::ValueError for a null
///   store.
[[nodiscard]] TORCHFUSE_API ProcessGroup init_process_group(c10::intrusive_ptr<c10d::Store> store,
                                                            const ProcessGroupOptions& options);

}  // namespace torchfuse::parallel
