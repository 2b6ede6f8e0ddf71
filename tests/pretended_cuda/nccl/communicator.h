// SPDX-License-Identifier: BSD-3-Clause
// Communicators, and what is handed to streams for them.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "message.h"
#include "segment.h"

namespace pretended_nccl {

/// One rank's end.
class Communicator {
 public:
  /// Waits for all ranks. Throws std::runtime_error, and std::invalid_argument if two ranks are the
  /// same or have the same device.
  Communicator(const ncclUniqueId& id, int rank_, int ranks_, int device_);

  /// Sends `bytes` to every rank and returns those of rank 0, rank 1 and so on. Waits for them.
  /// Throws std::runtime_error if it is aborted meanwhile.
  std::vector<char> gather_on_host(const char* name, const void* bytes, std::size_t count);

  /// The next turn; see Note [Turns].
  std::uint64_t take_turn();
  [[nodiscard]] bool has_turn(std::uint64_t number);
  /// It was used, or never will be.
  void give_back(std::uint64_t number);
  /// Whether no turn is out.
  [[nodiscard]] bool is_idle();

  const int rank;
  const int ranks;
  const int device;
  const std::unique_ptr<Segment> segment;
  std::atomic<bool> aborted = false;

 private:
  std::mutex mutex_;
  std::uint64_t taken_ = 0;
  std::set<std::uint64_t> out_;
};
using CommunicatorPointer = std::shared_ptr<Communicator>;

/// One collective, or one end of a message: who gets what, what comes from whom and where it lands,
/// and what is done when all has come.
struct Operation {
  struct Part {
    int peer = 0;
    char* bytes = nullptr;
  };
  CommunicatorPointer communicator;
  Call call;
  std::vector<Part> sent = {};
  std::vector<Part> received = {};
  std::function<void()> finish = {};
};

/// Note [Turns]
/// All ranks of a communicator make its calls in the same order, on whatever streams. So work of
/// one communicator begins in that order too: each launch takes a turn when it is issued, or when
/// the graph that it was captured in is launched, and waits until those before are done.

/// What was issued between ncclGroupStart and ncclGroupEnd, or one call. Its messages go on
/// together: a send does not hold up the receive that its peer waits for.
class Launch {
 public:
  Launch(std::vector<Operation> operations, bool captured);
  /// Of a replay.
  Launch(const Launch& captured) : Launch(captured.operations_, false) {}
  Launch& operator=(const Launch&) = delete;
  ~Launch() { give_turns_back(); }

  /// Goes on as far as it can; returns whether all is done. What belongs to a communicator that was
  /// aborted is dropped.
  bool run();

 private:
  struct Turn {
    CommunicatorPointer communicator;
    std::uint64_t number = 0;
  };
  [[nodiscard]] bool has_its_turns() const;
  void begin();
  void give_turns_back();

  std::vector<Operation> operations_;
  std::vector<Turn> turns_;
  std::vector<std::vector<Message>> messages_;  ///< of each operation
  bool begun_ = false;
};

/// Lets all messages go on; those from one rank to another one after the other. Those that have
/// arrived are taken from the lists. Returns whether all have.
bool advance(std::vector<std::vector<Message>>& lists);

}  // namespace pretended_nccl

/// What ncclComm_t points at.
struct ncclComm {
  pretended_nccl::CommunicatorPointer communicator;
};
