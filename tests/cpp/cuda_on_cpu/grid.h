// SPDX-License-Identifier: BSD-3-Clause
// What engine.cpp (which blocks and threads run when) and collectives.cpp (what they wait for)
// share. Not for tests.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "engine.h"
#include "fiber.h"
#include "shared_memory.h"

namespace cuda_on_cpu {

constexpr std::uint32_t kWarpLanes = 32;
constexpr std::uint32_t kMaxThreads = 1024;
constexpr unsigned kWholeWarp = 0xffffffffu;

/// What the lanes of a warp offer each other.
using WarpValues = std::array<std::uint64_t, kWarpLanes>;

struct Block;

/// One CUDA thread.
struct Thread {
  std::unique_ptr<Fiber> fiber;
  Block* block = nullptr;
  std::uint32_t index = 0;
  const char* waits_in = nullptr;  ///< null: it can run
  unsigned mask = 0;               ///< of the warp collective that it waits in
  std::uint64_t offered = 0;
  WarpValues of_part = {};                  ///< received in a collective of some lanes
  const std::uint64_t* received = nullptr;  ///< these, or those of the whole warp
  unsigned barrier_result = 0;
  bool exited = false;
};

struct Block {
  std::uint32_t index = 0;
  std::vector<std::unique_ptr<Thread>> threads;
  std::uint32_t at_barrier = 0;
  std::uint32_t exited = 0;
  unsigned predicates = 0;
  unsigned generation = 0;  ///< of barriers
  std::array<WarpValues, kMaxThreads / kWarpLanes> of_warps = {};
  /// Names for the race detector: two for the barriers' generations in turn, one for each warp.
  std::unique_ptr<char[]> order;
  std::unique_ptr<SharedMemory> shared;
};

/// The threads that can run. Never allocates while a kernel runs: the race detector would take the
/// scheduler's memory for the kernel's.
class RunQueue {
 public:
  void reset(std::size_t capacity) {
    slots_ = std::make_unique<Thread*[]>(capacity);
    capacity_ = capacity;
    first_ = size_ = 0;
  }
  bool empty() const { return size_ == 0; }
  std::size_t size() const { return size_; }
  void push(Thread& thread) { slots_[(first_ + size_++) % capacity_] = &thread; }
  /// Takes the thread at `position` out; the first takes its place.
  Thread& take(std::size_t position) {
    std::swap(slots_[first_], slots_[(first_ + position) % capacity_]);
    Thread& thread = *slots_[first_];
    first_ = (first_ + 1) % capacity_;
    --size_;
    return thread;
  }

 private:
  std::unique_ptr<Thread*[]> slots_;
  std::size_t capacity_ = 0;
  std::size_t first_ = 0;
  std::size_t size_ = 0;
};

/// The running launch, and what is kept between launches.
struct Engine {
  Schedule schedule;
  std::vector<LaunchShape> launches;
  std::string fault;
  int last_error = 0;

  const std::function<void()>* kernel = nullptr;
  Thread* current = nullptr;
  bool faulted = false;
  char fault_words[256] = {};  ///< of a running thread
  char begun = 0, ended = 0;   ///< names for the race detector
  std::minstd_rand random;
  std::deque<std::unique_ptr<Block>> idle;
  std::vector<std::unique_ptr<Block>> resident;
  std::vector<std::unique_ptr<SharedMemory>> used_shared;  ///< kept to the launch's end
  RunQueue runnable;
  std::vector<std::uint32_t> order;  ///< blocks to come, the next one last
};

Engine& engine();

inline void make_runnable(Thread& thread) {
  thread.waits_in = nullptr;
  engine().runnable.push(thread);
}

template <class... Values>
std::string text(const char* format, Values... values) {
  char buffer[256];
  std::snprintf(buffer, sizeof buffer, format, values...);
  return buffer;
}

/// Ends the launch with these words; the calling CUDA thread is never resumed. Allocates nothing:
/// what a fiber that is given up owns would be lost.
[[noreturn]] __attribute__((format(printf, 1, 2))) void fault(const char* format, ...);

}  // namespace cuda_on_cpu
