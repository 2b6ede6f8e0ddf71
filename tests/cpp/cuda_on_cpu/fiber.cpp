// SPDX-License-Identifier: BSD-3-Clause
#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// This file and engine.cpp are compiled without -fsanitize=thread, or the detector would take the
// scheduler's own bookkeeping for races: its interface is declared here.
#if defined(CUDA_ON_CPU_RACE_DETECTOR)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* object);
void __tsan_release(void* object);
}
#endif

// Saves the callee's registers and the stack pointer, and goes on where `to` was saved.
extern "C" void cuda_on_cpu_switch(void** from, void* to);
asm(R"(
.text
.globl cuda_on_cpu_switch
.type cuda_on_cpu_switch, @function
cuda_on_cpu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cuda_on_cpu_switch, .-cuda_on_cpu_switch
)");

namespace cuda_on_cpu {
namespace {

constexpr std::size_t kGuardBytes = 4096;
constexpr std::size_t kMappingBytes = Fiber::kStackBytes + 2 * kGuardBytes;

Fiber* current = nullptr;

void* map_stack() {
  void* mapping =
      mmap(nullptr, kMappingBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  char* const stack = static_cast<char*>(mapping) + kGuardBytes;
  if (mapping == MAP_FAILED || mprotect(stack, Fiber::kStackBytes, PROT_READ | PROT_WRITE) != 0) {
    std::perror("cuda_on_cpu: a stack for a CUDA thread");
    std::abort();
  }
  return mapping;
}

}  // namespace

Fiber& Fiber::scheduler() {
  static Fiber fiber{Scheduler{}};
  return fiber;
}

Fiber::Fiber(Scheduler) {
#if defined(CUDA_ON_CPU_RACE_DETECTOR)
  race_detector_fiber_ = __tsan_get_current_fiber();
#endif
}

Fiber::Fiber() : mapping_(map_stack()) {
  stack_bottom_ = static_cast<char*>(mapping_) + kGuardBytes;
  stack_bytes_ = kStackBytes;
#if defined(CUDA_ON_CPU_RACE_DETECTOR)
  race_detector_fiber_ = __tsan_create_fiber(0);
#endif
}

Fiber::~Fiber() {
  if (mapping_ == nullptr) return;
#if defined(__SANITIZE_ADDRESS__)
  // A fiber given up in the middle leaves its frames poisoned.
  __asan_unpoison_memory_region(stack_bottom_, stack_bytes_);
#endif
#if defined(CUDA_ON_CPU_RACE_DETECTOR)
  // There and back, the way back ordering memory: all that it did happened before what comes now.
  __tsan_switch_to_fiber(race_detector_fiber_, 1);
  __tsan_switch_to_fiber(scheduler().race_detector_fiber_, 0);
  __tsan_destroy_fiber(race_detector_fiber_);
#endif
  munmap(mapping_, kMappingBytes);
}

void Fiber::prepare(void (*entry)()) {
  const std::uintptr_t top = reinterpret_cast<std::uintptr_t>(stack_bottom_) + stack_bytes_;
  // Six saved registers, the address to go to, and a return address of 0, where unwinders stop:
  // after the `ret` the stack is aligned as after a call.
  auto* frame = reinterpret_cast<std::uintptr_t*>(top) - 8;
  for (int i = 0; i < 8; ++i) frame[i] = 0;
  frame[6] = reinterpret_cast<std::uintptr_t>(&Fiber::run_entry);
  stack_pointer_ = frame;
  entry_ = entry;
}

void Fiber::run_entry() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &scheduler().stack_bottom_, &scheduler().stack_bytes_);
#endif
  Fiber& self = *current;
  self.entry_();
  self.leave(true);  // for the last time: what the sanitizer keeps for the stack is released
  std::abort();      // nobody resumes a finished fiber
}

void Fiber::resume() {
  Fiber& from = scheduler();
  current = this;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&from.fake_stack_, stack_bottom_, stack_bytes_);
#endif
#if defined(CUDA_ON_CPU_RACE_DETECTOR)
  __tsan_switch_to_fiber(race_detector_fiber_, 1);  // 1: a switch orders no memory
#endif
  cuda_on_cpu_switch(&from.stack_pointer_, stack_pointer_);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(from.fake_stack_, nullptr, nullptr);
#endif
}

void Fiber::leave(bool for_good) {
  Fiber& to = scheduler();
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(for_good ? nullptr : &fake_stack_, to.stack_bottom_,
                                 to.stack_bytes_);
#else
  static_cast<void>(for_good);
#endif
#if defined(CUDA_ON_CPU_RACE_DETECTOR)
  __tsan_switch_to_fiber(to.race_detector_fiber_, 1);
#endif
  cuda_on_cpu_switch(&stack_pointer_, to.stack_pointer_);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack_, &to.stack_bottom_, &to.stack_bytes_);
#endif
}

#if defined(CUDA_ON_CPU_RACE_DETECTOR)
void race_release(void* object) { __tsan_release(object); }
void race_acquire(void* object) { __tsan_acquire(object); }
#else
void race_release(void*) {}
void race_acquire(void*) {}
#endif

}  // namespace cuda_on_cpu
