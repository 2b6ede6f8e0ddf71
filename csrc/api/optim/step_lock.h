// SPDX-License-Identifier: BSD-3-Clause
// Lock of an optimizer. Does not include torch, so that the thread sanitizer sees all code.
#pragma once

#include <atomic>
#include <mutex>
#include <thread>

namespace torchfuse::optim {

/// Mutex that detects re-entrant calls: a closure, a hook or a destructor may call step() inside a
/// step, and would deadlock.
class StepLock {
 public:
  /// Waits for other threads. Returns false, without locking, if the calling thread has the lock.
  [[nodiscard]] bool lock() {
    // Relaxed, because only the calling thread can have stored its id.
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
