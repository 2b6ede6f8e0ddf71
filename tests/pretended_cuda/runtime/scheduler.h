// SPDX-License-Identifier: BSD-3-Clause
// Streams, and the order in which their work is done.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

namespace pretended_cuda {

struct Capture;

/// A place in the order of one stream: reached when so many pieces of its work are done.
struct Place {
  CUstream_st* stream = nullptr;
  std::uint64_t position = 0;
  [[nodiscard]] bool reached() const;
};

/// One piece of work. `run` returns false to be called again.
struct Work {
  const char* name = "";
  std::function<bool()> run;
  bool has_peers = false;
  /// Makes what a replay runs in the place of `run`, if that is not the same for all.
  std::function<std::function<bool()>()> run_of_replay = {};
  Place after = {};         ///< elsewhere, that must be reached first
  std::uint64_t order = 0;  ///< of handing over
};
using WorkPointer = std::shared_ptr<Work>;

}  // namespace pretended_cuda

/// What cudaStream_t points at. Guarded by the scheduler's lock.
struct CUstream_st {
  int device = 0;
  unsigned flags = 0;
  int priority = 0;
  std::deque<pretended_cuda::WorkPointer> queue;
  std::uint64_t submitted = 0;  ///< pieces of work so far
  std::uint64_t done = 0;
  bool stalled = false;  ///< its first piece could not go on
  pretended_cuda::Capture* capture = nullptr;

  [[nodiscard]] pretended_cuda::Place end() { return {this, submitted}; }
};

namespace pretended_cuda {

inline bool Place::reached() const { return stream == nullptr || stream->done >= position; }

using Lock = std::unique_lock<std::mutex>;

/// Note [The order of time]
/// Eager: whatever can be done is done when it is handed over. Lazy: work waits until the host
/// waits for something; then a stream whose first piece may run is chosen at random, again and
/// again, until what is waited for is done. One stream may be far ahead of another or far behind:
/// what neither an event nor a synchronization orders happens in other orders with other seeds. In
/// both, a collective whose peers are missing keeps its place, and what is behind it waits.
///
/// A device goes on while the host does something else. Here that matters only if other processes
/// wait for this one: a thread goes on with the work when a collective is pending and the program
/// has left the runtime alone for a while.
class Scheduler {
 public:
  static Scheduler& instance();

  Lock lock() { return Lock(mutex_); }
  /// 0: eager. Any other seed: lazy, with that order.
  void set_seed(unsigned seed);
  [[nodiscard]] bool lazy() const { return seed_ != 0; }

  /// Makes the default stream of the current device of 0, cudaStreamLegacy and cudaStreamPerThread.
  CUstream_st* resolve(cudaStream_t stream);
  CUstream_st* create(unsigned flags, int priority);
  /// Whether it is a device's default stream.
  [[nodiscard]] bool is_default(const CUstream_st* stream) const;

  /// Queues the work behind what the stream has, or records it where the stream captures.
  void submit(Lock& lock, CUstream_st* stream, Work work);
  void wait(Lock& lock, const Place& place);
  void wait_for_device(Lock& lock, int device);
  void wait_for_all(Lock& lock);
  /// Lets one piece run, as time passes for a program that asks whether `place` is reached.
  void pass_time(Lock& lock, const Place& place);

  [[nodiscard]] std::uint64_t pending() const;
  void drop_pending(Lock& lock);

 private:
  Scheduler();
  void push(CUstream_st* stream, Work work);
  void order_with_default_stream(CUstream_st* stream);
  [[nodiscard]] CUstream_st* choose();
  bool run_first(Lock& lock, CUstream_st* stream);
  bool run_any(Lock& lock);
  void go_on_alone();
  void stop_alone();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::unique_ptr<CUstream_st>> streams_;
  std::vector<CUstream_st*> default_streams_;  ///< by device
  unsigned seed_ = 0;
  std::mt19937 random_;
  std::uint64_t submitted_ = 0;
  std::uint64_t completed_ = 0;
  std::uint64_t with_peers_ = 0;  ///< pending pieces that have peers
  bool running_ = false;          ///< a piece runs, without the lock
  bool alone_ = false;            ///< the thread exists
  bool ending_ = false;           ///< the program has left main()
  std::chrono::steady_clock::time_point last_call_;
};

}  // namespace pretended_cuda
