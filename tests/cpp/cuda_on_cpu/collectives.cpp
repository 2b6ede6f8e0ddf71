// SPDX-License-Identifier: BSD-3-Clause
// Barriers, warp collectives and checks: all that is called by running CUDA threads.
#include <cstdarg>
#include <cstdlib>

#include "grid.h"

namespace cuda_on_cpu {
namespace {

bool names(unsigned mask, std::uint32_t lane) { return (mask >> lane & 1u) != 0; }

void open_barrier(Block& block) {
  for (auto& thread : block.threads) {
    thread->barrier_result = block.predicates;
    make_runnable(*thread);
  }
  block.at_barrier = 0;
  block.predicates = 0;
  ++block.generation;
}

/// Whether all lanes of the collective that `last` came to wait in it. The highest is looked at
/// first: where threads run in their order, it comes last.
bool is_complete(const Thread& last) {
  const Block& block = *last.block;
  const std::uint32_t first = last.index / kWarpLanes * kWarpLanes;
  for (std::uint32_t lane = kWarpLanes; lane-- > 0;) {
    if (!names(last.mask, lane)) continue;
    if (first + lane >= block.threads.size()) {
      fault("%s names lane %u, which does not exist", last.waits_in, lane);
    }
    const Thread& thread = *block.threads[first + lane];
    if (thread.exited) fault("%s names lane %u, which has exited", last.waits_in, lane);
    if (thread.waits_in != last.waits_in || thread.mask != last.mask) return false;
  }
  return true;
}

/// Hands every lane of the collective all lanes' values and lets the others go on.
void complete_collective(Thread& last) {
  auto& threads = last.block->threads;
  const std::uint32_t first = last.index / kWarpLanes * kWarpLanes;
  const auto write_values = [&](std::uint64_t* values) {
    for (std::uint32_t source = 0; source < kWarpLanes; ++source) {
      values[source] = names(last.mask, source) ? threads[first + source]->offered : 0;
    }
  };
  // One copy does for a whole warp: all its lanes have read it when they are here again.
  std::uint64_t* const of_warp = last.block->of_warps[first / kWarpLanes].data();
  const bool is_whole = last.mask == kWholeWarp;
  if (is_whole) write_values(of_warp);
  for (std::uint32_t lane = 0; lane < kWarpLanes; ++lane) {
    if (!names(last.mask, lane)) continue;
    Thread& thread = *threads[first + lane];
    if (!is_whole) write_values(thread.of_part.data());
    thread.received = is_whole ? of_warp : thread.of_part.data();
    if (&thread != &last) make_runnable(thread);
  }
  last.waits_in = nullptr;
}

void collective(const char* what, unsigned mask) {
  Thread& self = *engine().current;
  if (!names(mask, self.index % kWarpLanes)) {
    fault("%s is called by a lane that its mask %08x does not name", what, mask);
  }
  self.mask = mask;
  self.waits_in = what;
  if (is_complete(self)) {
    complete_collective(self);
  } else {
    self.fiber->suspend();
  }
}

}  // namespace

unsigned block_barrier(const char* what, unsigned predicate) {
  Thread& self = *engine().current;
  Block& block = *self.block;
  char* const order = &block.order[block.generation % 2];
  race_release(order);
  block.predicates += predicate;
  ++block.at_barrier;
  self.waits_in = what;
  if (block.at_barrier == block.threads.size()) open_barrier(block);
  self.fiber->suspend();
  race_acquire(order);
  return self.barrier_result;
}

void warp_barrier(unsigned mask) {
  Thread& self = *engine().current;
  char* const order = &self.block->order[2 + self.index / kWarpLanes];
  race_release(order);
  collective("__syncwarp", mask);
  race_acquire(order);
}

const std::uint64_t* warp_exchange(const char* what, unsigned mask, std::uint64_t value) {
  Thread& self = *engine().current;
  self.offered = value;
  collective(what, mask);
  return self.received;
}

void require_lane(const char* what, unsigned mask, unsigned lane) {
  if (lane < kWarpLanes && names(mask, lane)) return;
  fault("%s reads lane %u, which its mask %08x does not name", what, lane, mask);
}

void require_aligned(const void* address, std::size_t bytes) {
  if (reinterpret_cast<std::uintptr_t>(address) % bytes == 0) return;
  fault("an access of %zu bytes at the misaligned address %p", bytes, address);
}

void maybe_switch_thread() {
  Engine& e = engine();
  if (e.schedule.seed == 0 || e.random() % 64 != 0) return;
  make_runnable(*e.current);
  e.current->fiber->suspend();
}

bool in_kernel() { return engine().current != nullptr; }

bool on_running_stack(const void* address) { return engine().current->fiber->has(address); }

SharedMemory& shared_of_running_block() { return *engine().current->block->shared; }

void fault(const char* format, ...) {
  Engine& e = engine();
  e.faulted = true;
  const int begin = std::snprintf(e.fault_words, sizeof e.fault_words,
                                  "block %u, thread %u: ", running.block, running.thread);
  std::va_list values;
  va_start(values, format);
  std::vsnprintf(e.fault_words + begin, sizeof e.fault_words - static_cast<std::size_t>(begin),
                 format, values);
  va_end(values);
  race_release(&e.ended);
  e.current->fiber->suspend();
  std::abort();  // the launch is over
}

}  // namespace cuda_on_cpu
