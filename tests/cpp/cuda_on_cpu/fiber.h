// SPDX-License-Identifier: BSD-3-Clause
// A stack with a function running on it, known to the sanitizers. x86-64, one operating-system
// thread.
#pragma once

#include <cstddef>

namespace cuda_on_cpu {

class Fiber {
 public:
  static constexpr std::size_t kStackBytes = 256 * 1024;

  /// The context that calls resume().
  static Fiber& scheduler();

  Fiber();  ///< with a stack between inaccessible pages
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  /// Makes `entry` what the next resume() runs.
  void prepare(void (*entry)());
  /// Runs this fiber until it suspends or its entry returns. Called by the scheduler only.
  void resume();
  /// Returns whether an address is on the stack.
  bool has(const void* address) const {
    return static_cast<std::size_t>(static_cast<const char*>(address) -
                                    static_cast<const char*>(stack_bottom_)) < stack_bytes_;
  }
  /// Goes back to the scheduler.
  void suspend() { leave(false); }

 private:
  struct Scheduler {};
  explicit Fiber(Scheduler);
  static void run_entry();
  void leave(bool for_good);

  void (*entry_)() = nullptr;
  void* stack_pointer_ = nullptr;
  void* mapping_ = nullptr;
  const void* stack_bottom_ = nullptr;
  std::size_t stack_bytes_ = 0;
  void* fake_stack_ = nullptr;
  void* race_detector_fiber_ = nullptr;
};

/// Orders memory for the race detector: what happened before any release of `object` by other
/// fibers happened before this fiber's acquire. Nothing without it.
void race_release(void* object);
void race_acquire(void* object);

}  // namespace cuda_on_cpu
