// SPDX-License-Identifier: BSD-3-Clause
#include "engine.h"

#include <immintrin.h>

#include <algorithm>
#include <cstdlib>

#include "grid.h"

namespace cuda_on_cpu {

Running running;

Engine& engine() {
  static Engine instance;
  return instance;
}

namespace {

constexpr std::size_t kMaxArgumentBytes = 32764;
// Values of cudaError_t.
constexpr int kInvalidValue = 1;
constexpr int kInvalidConfiguration = 9;
constexpr int kLaunchFailure = 719;

#if defined(CUDA_ON_CPU_RACE_DETECTOR)
// Threads of different blocks that use one fiber in turn look ordered to the detector, so a fiber
// is used again as late as possible.
constexpr std::size_t kBlocksBeforeReuse = 8;
#else
constexpr std::size_t kBlocksBeforeReuse = 1;
#endif

/// Entry of every fiber.
void run_thread() {
  Engine& e = engine();
  Thread& self = *e.current;
  race_acquire(&e.begun);
  (*e.kernel)();
  race_release(&e.ended);
  self.exited = true;
  ++self.block->exited;
}

std::unique_ptr<Block> take_block() {
  Engine& e = engine();
  if (e.idle.empty() || e.idle.size() + e.resident.size() < kBlocksBeforeReuse) {
    return std::make_unique<Block>();
  }
  std::unique_ptr<Block> block = std::move(e.idle.front());
  e.idle.pop_front();
  return block;
}

void start_block(std::uint32_t index, std::uint32_t threads) {
  Engine& e = engine();
  std::unique_ptr<Block> block = take_block();
  block->index = index;
  block->at_barrier = block->exited = block->predicates = 0;
  block->shared = std::make_unique<SharedMemory>();
  block->order = std::make_unique<char[]>(2 + kMaxThreads / kWarpLanes);
  race_release(&e.begun);
  while (block->threads.size() < threads) {
    block->threads.push_back(std::make_unique<Thread>());
    block->threads.back()->fiber = std::make_unique<Fiber>();
  }
  block->threads.resize(threads);
  for (std::uint32_t i = 0; i < threads; ++i) {
    Thread& thread = *block->threads[i];
    thread.block = block.get();
    thread.index = i;
    thread.exited = false;
    thread.fiber->prepare(run_thread);
    make_runnable(thread);
  }
  e.resident.push_back(std::move(block));
}

void retire_block(Block& block) {
  Engine& e = engine();
  e.used_shared.push_back(std::move(block.shared));
  const auto same = [&](const auto& resident) { return resident.get() == &block; };
  const auto at = std::find_if(e.resident.begin(), e.resident.end(), same);
  e.idle.push_back(std::move(*at));
  e.resident.erase(at);
}

/// Why nothing can run although threads are left.
std::string describe_deadlock() {
  std::string words = "no thread can go on:";
  for (const auto& block : engine().resident) {
    std::string before;
    for (const auto& thread : block->threads) {
      const std::string state =
          thread->exited ? "has exited" : std::string("waits in ") + thread->waits_in;
      if (state != before) {
        words += text("\n  block %u, from thread %u on: ", block->index, thread->index) + state;
      }
      before = state;
    }
  }
  return words;
}

/// Runs until all blocks have ended, or a fault.
void run_blocks(std::uint32_t threads) {
  Engine& e = engine();
  while (!e.faulted) {
    while (e.resident.size() < e.schedule.resident_blocks && !e.order.empty()) {
      start_block(e.order.back(), threads);
      e.order.pop_back();
    }
    if (e.resident.empty()) return;
    if (e.runnable.empty()) {
      e.faulted = true;
      e.fault = describe_deadlock();
      return;
    }
    Thread& thread = e.runnable.take(e.schedule.seed == 0 ? 0 : e.random() % e.runnable.size());
    e.current = &thread;
    running.thread = thread.index;
    running.block = thread.block->index;
    thread.fiber->resume();
    if (thread.block->exited == threads) retire_block(*thread.block);
  }
}

int refuse(int error, const std::string& words) {
  engine().fault = words;
  return engine().last_error = error;
}

void prepare(const LaunchShape& shape, const std::function<void()>& kernel) {
  Engine& e = engine();
  e.launches.push_back(shape);
  e.kernel = &kernel;
  e.faulted = false;
  e.fault.clear();
  e.random.seed(static_cast<std::uint_fast32_t>(e.schedule.seed));
  e.order.clear();
  for (std::uint32_t block = shape.grid[0]; block-- > 0;) {
    if (!e.schedule.selected || e.schedule.selected(block)) e.order.push_back(block);
  }
  if (e.schedule.seed != 0) std::shuffle(e.order.begin(), e.order.end(), e.random);
  e.runnable.reset(std::size_t{shape.block[0]} * e.schedule.resident_blocks);
  running.threads_per_block = shape.block[0];
  running.blocks = shape.grid[0];
}

}  // namespace

void set_schedule(Schedule schedule) {
  if (schedule.resident_blocks == 0) schedule.resident_blocks = 1;
  engine().schedule = std::move(schedule);
}

const std::vector<LaunchShape>& launches() { return engine().launches; }
void clear_launches() { engine().launches.clear(); }
const std::string& last_fault() { return engine().fault; }

int check_shape(const LaunchShape& shape) {
  if (shape.grid[1] != 1 || shape.grid[2] != 1 || shape.block[1] != 1 || shape.block[2] != 1) {
    return refuse(kInvalidConfiguration, "cuda_on_cpu runs one-dimensional grids and blocks only");
  }
  if (shape.grid[0] == 0 || shape.grid[0] > 0x7fffffffu) {
    return refuse(kInvalidConfiguration, text("a grid of %u blocks", shape.grid[0]));
  }
  if (shape.block[0] == 0 || shape.block[0] > kMaxThreads) {
    return refuse(kInvalidConfiguration, text("a block of %u threads", shape.block[0]));
  }
  if (shape.argument_bytes > kMaxArgumentBytes) {
    return refuse(kInvalidValue, text("%zu bytes of arguments, the limit is %zu",
                                      shape.argument_bytes, kMaxArgumentBytes));
  }
  if (shape.shared_bytes != 0) return refuse(kInvalidValue, "dynamic shared memory");
  return 0;
}

int run_grid(const LaunchShape& shape, const std::function<void()>& kernel) {
  if (const int error = check_shape(shape)) return error;
  prepare(shape, kernel);
  Engine& e = engine();
  const unsigned control = _mm_getcsr();
  constexpr unsigned kFlush = 0x8040;  // of results and of operands
  if (e.schedule.flush_denormals) _mm_setcsr(control | kFlush);
  run_blocks(shape.block[0]);
  _mm_setcsr(control);
  race_acquire(&e.ended);
  e.current = nullptr;
  e.used_shared.clear();
  if (!e.faulted) return 0;
  e.resident.clear();  // with fibers that are in the middle of the kernel
  return refuse(kLaunchFailure,
                e.fault.empty() ? std::string(e.fault_words) : std::string(e.fault));
}

int take_last_error() { return std::exchange(engine().last_error, 0); }

}  // namespace cuda_on_cpu
