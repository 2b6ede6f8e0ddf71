// SPDX-License-Identifier: BSD-3-Clause
// One step of an optimizer at a time. Without torch, so that the thread sanitizer sees all of it.
#pragma once

#include <atomic>
#include <mutex>
#include <thread>

namespace torchfuse::optim {

/// Excludes other threads from a step, and tells a thread that it is in one already: a closure, a
/// hook or a destructor may ask for a step inside of a step, and would wait for itself.
class StepLock {
 public:
  /// Waits for the steps of other threads. False, without the lock, inside of a step of the calling
  /// thread.
  [[nodiscard]] bool lock() {
    // Only the calling thread can have written its own id.
    if (holder_.load(std::memory_order_relaxed) == std::this_thread::get_id()) return false;
    mutex_.lock();
    holder_.store(std::this_thread::get_id(), std::memory_order_relaxed);
    return true;
  }

  void unlock() {
    holder_.store(std::thread::id(), std::memory_order_relaxed);
    mutex_.unlock();
  }

 private:
  std::mutex mutex_;
  std::atomic<std::thread::id> holder_;
};

}  // namespace torchfuse::optim
