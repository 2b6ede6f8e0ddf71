// SPDX-License-Identifier: BSD-3-Clause
// Memory that the ranks of one communicator share: a ring of bytes for each ordered pair.
#pragma once

#include <nccl.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace pretended_nccl {

/// As many as the runtime has devices at most: two ranks of a communicator never share one.
constexpr int kMaxRanks = 16;

/// Bytes from one rank to another, in order. One writes, one reads; neither waits.
class Ring {
 public:
  /// Returns how many bytes there was room for.
  std::size_t put(const char* bytes, std::size_t count);
  /// How many bytes were put so far, and whether so many were taken.
  [[nodiscard]] std::uint64_t written() const { return written_.load(std::memory_order_relaxed); }
  [[nodiscard]] bool is_taken(std::uint64_t end) const;
  /// Returns how many bytes were there.
  std::size_t take(char* bytes, std::size_t count);

 private:
  static constexpr std::size_t kBytes = std::size_t{256} << 10;
  std::atomic<std::uint64_t> written_;
  std::atomic<std::uint64_t> read_;
  char bytes_[kBytes];
};

/// Who uses the rings: collectives on streams, or calls of the host that wait for their peers.
enum class Side { kStreams, kHost };

/// It belongs to no file: the operating system frees it when the last process has ended, however.
class Segment {
 public:
  /// Makes an anonymous one, that others find by the id.
  static ncclUniqueId make_id();
  /// Forgets one that this process made.
  static void discard(const ncclUniqueId& id);

  /// Waits for all ranks. Throws std::runtime_error if the id is not of a segment that exists.
  static std::unique_ptr<Segment> join(const ncclUniqueId& id, int rank, int ranks, int device);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  Ring& ring(Side side, int from, int to);
  [[nodiscard]] int device_of(int rank) const;

 private:
  struct Shared;
  Segment(Shared* shared, int ranks) : shared_(shared), ranks_(ranks) {}
  Shared* shared_;
  int ranks_;
};

}  // namespace pretended_nccl
