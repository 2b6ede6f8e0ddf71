// SPDX-License-Identifier: BSD-3-Clause
// Runs the threads of a grid as fibers of one thread. See README.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace cuda_on_cpu {

// --- For tests -----------------------------------------------------------------------------------

/// How the launches that follow are run.
struct Schedule {
  std::uint64_t seed = 0;             ///< of the order of blocks and threads; 0: ascending order
  std::uint32_t resident_blocks = 2;  ///< blocks that run interleaved
  bool flush_denormals = true;        ///< as -ftz=true does to fp32; false for fp64 kernels
  /// Blocks that run; null: all. For grids too large to run, whose blocks do not meet.
  std::function<bool(std::uint32_t block)> selected = nullptr;
};
void set_schedule(Schedule schedule);

struct LaunchShape {
  std::uint32_t grid[3] = {1, 1, 1};
  std::uint32_t block[3] = {1, 1, 1};
  std::size_t argument_bytes = 0;
  std::size_t shared_bytes = 0;  ///< dynamic; refused, as no kernel uses it
};

/// The launches since the last call with `clear`.
const std::vector<LaunchShape>& launches();
void clear_launches();

/// What was wrong with the last launch that failed.
const std::string& last_fault();

// --- For include/cuda_runtime.h ------------------------------------------------------------------

/// The running CUDA thread. Plain variables: one operating-system thread runs all fibers.
struct Running {
  std::uint32_t thread = 0;
  std::uint32_t block = 0;
  std::uint32_t threads_per_block = 0;
  std::uint32_t blocks = 0;
};
extern Running running;

/// Takes a launch over. launch.cpp runs it at once; tests/pretended_cuda hands it to a stream. 0,
/// or the error that the runtime would report.
int launch(void* stream, const LaunchShape& shape, std::function<void()> kernel);
/// 0, or the error for a launch that a device would refuse.
int check_shape(const LaunchShape& shape);
/// Runs all threads of the grid to their end. 0, or an error.
int run_grid(const LaunchShape& shape, const std::function<void()>& kernel);
int take_last_error();

/// Waits for all threads of the block and returns how many had `predicate` set.
unsigned block_barrier(const char* what, unsigned predicate);
/// Waits for the lanes of `mask`; memory is ordered between them.
void warp_barrier(unsigned mask);
/// Waits for the lanes of `mask` and returns the 32 lanes' values, good until the calling thread's
/// next exchange. Orders no memory.
const std::uint64_t* warp_exchange(const char* what, unsigned mask, std::uint64_t value);

/// Stop the launch with a fault unless the condition holds.
void require_lane(const char* what, unsigned mask, unsigned lane);
void require_aligned(const void* address, std::size_t bytes);
/// Lets another thread run, if the schedule's dice say so.
void maybe_switch_thread();
/// Whether a kernel is running.
bool in_kernel();
/// Returns whether an address is on the stack of the thread that runs in a kernel.
bool on_running_stack(const void* address);

}  // namespace cuda_on_cpu
