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

/// Options of init_process_group(). Missing values come from the variables that torchrun sets.
struct ProcessGroupOptions {
  /// "gloo" or "nccl"; none: nccl if this build has it and torch finds a GPU, else gloo.
  TORCH_ARG(std::optional<std::string>, backend);
  /// Timeout of joining and of every collective.
  TORCH_ARG(std::chrono::milliseconds, timeout) = std::chrono::minutes(10);
  /// How long a process that leaves the group waits for the others to leave as well.
  TORCH_ARG(std::chrono::milliseconds, leave_timeout) = std::chrono::seconds(10);
  TORCH_ARG(std::optional<std::int64_t>, rank);         ///< replaces RANK
  TORCH_ARG(std::optional<std::int64_t>, world_size);   ///< replaces WORLD_SIZE
  TORCH_ARG(std::optional<std::int64_t>, local_rank);   ///< replaces LOCAL_RANK; neither: rank
  TORCH_ARG(std::optional<std::string>, master_addr);   ///< replaces MASTER_ADDR
  TORCH_ARG(std::optional<std::int64_t>, master_port);  ///< replaces MASTER_PORT
  /// Name under which the group is registered; also the prefix of its keys in the store.
  TORCH_ARG(std::string, name) = "torchfuse";
};

/// Owns a process group of c10d. While this object lives, the group is registered under its name:
/// torchfuse::all_reduce_, `amp::GradScalerOptions().process_group(name)` and torch's functional
/// collectives find it.
///
/// The destructor, or close(), first closes the groups made by new_group(). It then waits until all
/// ranks are about to leave (up to ProcessGroupOptions::leave_timeout), removes the name, shuts the
/// backend down and releases the store. While an exception unwinds the stack it does not wait, and
/// aborts the backend. Movable, not copyable.
class TORCHFUSE_API ProcessGroup {
 public:
  ~ProcessGroup();
  /// Movable, not copyable.
  ProcessGroup(ProcessGroup&& other) noexcept;
  /// Movable, not copyable. Closes the group that was held before.
  ProcessGroup& operator=(ProcessGroup&& other) noexcept;
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;

  std::int64_t rank() const;                  ///< rank of this process in this group
  std::int64_t world_size() const;            ///< number of processes in this group
  std::int64_t local_rank() const;            ///< rank on this machine: index of the GPU to use
  const std::string& name() const;            ///< name under which the group is registered
  const std::string& backend() const;         ///< "gloo" or "nccl"
  std::chrono::milliseconds timeout() const;  ///< timeout of every collective
  bool is_open() const noexcept;  ///< false after close(), also of the group that made this one
  /// Returns the group itself, for torch's own functions.
  const c10::intrusive_ptr<c10d::ProcessGroup>& get() const;

  /// Makes a group of some of this group's processes, with its own connections. All processes of
  /// this group must call it with the same `ranks`, in the same order.
  /// @param ranks ranks within this group, without duplicates; they are sorted, and the index of a
  ///   rank in the sorted list is its rank in the new group.
  /// @return the new group; none in a process that is not in `ranks`.
  /// @throws c10::ValueError for ranks that are empty, duplicate or not in this group.
  std::optional<ProcessGroup> new_group(std::vector<std::int64_t> ranks);

  /// Returns when all processes of this group have called it.
  /// @throws c10::Error after the timeout, naming the group.
  void barrier();
  /// Leaves the group, as ProcessGroup describes. A second call does nothing.
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

/// Joins the group of all processes that torchrun started; each process calls it once.
///
///     // torchrun --no-python --nproc-per-node 2 ./program
///     auto group = torchfuse::parallel::init_process_group();
///
/// Reads RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, LOCAL_RANK, TORCHELASTIC_USE_AGENT_STORE and
/// TORCHELASTIC_RESTART_COUNT. Without torchrun, rank 0 serves the store at
/// `MASTER_ADDR:MASTER_PORT`.
///
/// @throws c10::ValueError naming the variable or option that is missing or out of range, and for a
///   backend that is unknown or not part of this build.
/// @throws c10::Error within the timeout if the port is in use or nobody answers, and if a rank
///   does not join, joins twice or was started with another world size.
[[nodiscard]] TORCHFUSE_API ProcessGroup
init_process_group(const ProcessGroupOptions& options = {});

/// Joins a group through the caller's store, with keys that start with the group's name. Reads no
/// environment variables: `rank` and `world_size` must be given.
/// @throws c10::ValueError and c10::Error as above, and c10::ValueError without a store.
[[nodiscard]] TORCHFUSE_API ProcessGroup init_process_group(c10::intrusive_ptr<c10d::Store> store,
                                                            const ProcessGroupOptions& options);

}  // namespace torchfuse::parallel
