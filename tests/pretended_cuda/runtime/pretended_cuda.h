// SPDX-License-Identifier: BSD-3-Clause
// What the pretended runtime offers beside CUDA's own functions: to the launch of our kernels, to
// the redirected ATen ops, to the pretended NCCL, and to tests.
#pragma once

#include <cuda_runtime_api.h>

extern "C" {

/// A piece of work for a stream. `run` returns whether it is done; 0 asks to be called again, after
/// other streams had their turn. It runs with no lock held, on any thread, at most one in the
/// process at a time, and calls no function of the runtime. An exception that leaves it is a fault
/// of the device. What was captured runs once per replay; with `copy`, each replay has a context of
/// its own, made when the graph is launched. `destroy` is called once for each context, when
/// nothing will run any more.
struct pretended_cuda_work {
  const char* name;  ///< must outlive the work
  int (*run)(void* context);
  void (*destroy)(void* context);
  void* context;
  int has_peers;  ///< waits for other processes: it goes on while the host does something else
  void* (*copy)(void* context) = nullptr;
};

/// Takes the work over, whatever the result. Runs it when the order of time says so.
cudaError_t pretended_cuda_submit(cudaStream_t stream, const pretended_cuda_work* work);

/// Whether the stream has nothing left to do and does not capture.
int pretended_cuda_is_idle(cudaStream_t stream);
/// Whether work waits until the host does.
int pretended_cuda_is_lazy();

/// Waits until the stream has nothing left to do, without being a synchronization in the program's
/// eyes. cudaErrorStreamCaptureUnsupported while it captures.
cudaError_t pretended_cuda_settle(cudaStream_t stream);

/// Let host code of ours read and write the device's memory, as kernels do. They nest, in any
/// thread.
void pretended_cuda_open_memory();
void pretended_cuda_close_memory();

/// A kernel has gone wrong: every later call that can fail does so with `error`.
void pretended_cuda_fault(cudaError_t error, const char* words);

// --- For the runtime's own tests -----------------------------------------------------------------

/// The number of pieces of work that are handed over and not done, on all streams.
unsigned long long pretended_cuda_pending();
/// Drops what is pending and forgets a fault, in this process.
void pretended_cuda_reset();
/// As the environment variables PRETENDED_CUDA_SEED and PRETENDED_CUDA_MEMORY, from now on.
void pretended_cuda_set_seed(unsigned seed);
void pretended_cuda_set_memory(unsigned long long bytes);

}  // extern "C"
