// SPDX-License-Identifier: BSD-3-Clause
#include "planted_kernels.h"

#include <cuda_runtime.h>

#include <atomic>

#include "kernels/common/atomic.h"
#include "kernels/common/shared.h"

namespace cuda_on_cpu::planted {
namespace {

using torchfuse::kernels::block_shared;
using torchfuse::kernels::fetch_add_acq_rel;

template <class... Arguments>
int start(void (*kernel)(Arguments...), dim3 grid, dim3 block, std::size_t shared_bytes,
          std::type_identity_t<Arguments>... arguments) {
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))..., nullptr};
  return cudaLaunchKernel(kernel, grid, block, pointers, shared_bytes);
}

struct ReverseShared {
  float values[kThreads];
};

__global__ void reverse_kernel(const float* in, float* out, Flaw flaw) {
  ReverseShared& shared = block_shared<ReverseShared>();
  const unsigned first = blockIdx.x * kThreads;
  shared.values[threadIdx.x] = in[first + threadIdx.x];
  if (flaw == Flaw::kNone) __syncthreads();
  out[first + threadIdx.x] = shared.values[kThreads - 1 - threadIdx.x];
}

struct LastShared {
  bool last;
};

__global__ void last_block_kernel(std::uint32_t* partials, std::uint32_t* arrivals,
                                  std::uint32_t* sum, Flaw flaw) {
  LastShared& shared = block_shared<LastShared>();
  if (threadIdx.x == 0) {
    partials[blockIdx.x] = blockIdx.x + 1;
    const std::uint32_t before =
        flaw == Flaw::kNone
            ? fetch_add_acq_rel(arrivals, 1)
            : std::atomic_ref<std::uint32_t>(*arrivals).fetch_add(1, std::memory_order_relaxed);
    shared.last = before == gridDim.x - 1;
  }
  __syncthreads();
  if (!shared.last || threadIdx.x != 0) return;
  *sum = 0;
  for (unsigned block = 0; block < gridDim.x; ++block) *sum += partials[block];
}

__global__ void scale_kernel(float* data, unsigned numel, Flaw flaw) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < numel || flaw == Flaw::kPlanted) data[i] *= 2;
}

__global__ void iota_kernel(float* data, unsigned numel, Flaw flaw) {
  const unsigned end = flaw == Flaw::kNone ? numel : numel - 1;
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < end) data[i] = static_cast<float>(i);
}

__global__ void divergent_barrier_kernel() {
  if (threadIdx.x % 2 == 0) __syncthreads();
}

__global__ void exited_lane_kernel() {
  if (threadIdx.x == 3) return;
  __shfl_down_sync(0xffffffffu, 1.0f, 1);
}

__global__ void outside_mask_kernel(float* out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_down_sync(0x0000ffffu, 1.0f, 1);
}

__global__ void load_vector_kernel(const float* data, float* out) {
  const uint4 four = __ldcs(reinterpret_cast<const uint4*>(data));
  *out = static_cast<float>(four.x);
}

struct HugeShared {
  char bytes[48 * 1024 + 1];
};

__global__ void huge_shared_kernel() { block_shared<HugeShared>().bytes[0] = 1; }

struct UnwrittenShared {
  std::uint32_t values[kThreads];
};

__global__ void unwritten_shared_kernel(std::uint32_t* out) {
  out[threadIdx.x] = block_shared<UnwrittenShared>().values[threadIdx.x];
}

__global__ void collectives_kernel(std::uint32_t* out) {
  const unsigned i = threadIdx.x;
  const auto put = [&](Row row, unsigned value) {
    out[static_cast<unsigned>(row) * kThreads + i] = value;
  };
  constexpr unsigned kAll = 0xffffffffu;
  put(Row::kShfl, __shfl_sync(kAll, i, 5));
  put(Row::kDown, __shfl_down_sync(kAll, i, 3));
  put(Row::kXor, static_cast<unsigned>(__shfl_xor_sync(kAll, static_cast<double>(i), 1)));
  put(Row::kOr, static_cast<unsigned>(__syncthreads_or(i == 40)));
  put(Row::kNone, static_cast<unsigned>(__syncthreads_or(i > kThreads)));
  __syncwarp();
  put(Row::kSegment, __shfl_down_sync(kAll, i, 1, 8));
}

__global__ void trace_kernel(std::uint32_t* sequence, std::uint32_t* length) {
  sequence[fetch_add_acq_rel(length, 1)] = blockIdx.x;
  __syncthreads();
  sequence[fetch_add_acq_rel(length, 1)] = blockIdx.x;
}

struct LargeArguments {
  char bytes[32768];
};

__global__ void nothing_kernel() {}
__global__ void large_arguments_kernel(const LargeArguments __grid_constant__) {}

}  // namespace

int reverse_blocks(const float* in, float* out, unsigned blocks, Flaw flaw) {
  return start(reverse_kernel, blocks, kThreads, 0, in, out, flaw);
}
int last_block_sums(std::uint32_t* partials, std::uint32_t* arrivals, std::uint32_t* sum,
                    unsigned blocks, Flaw flaw) {
  return start(last_block_kernel, blocks, kThreads, 0, partials, arrivals, sum, flaw);
}
int scale(float* data, unsigned numel, Flaw flaw) {
  return start(scale_kernel, numel / kThreads + 1, kThreads, 0, data, numel, flaw);
}
int iota(float* data, unsigned numel, Flaw flaw) {
  return start(iota_kernel, numel / kThreads + 1, kThreads, 0, data, numel, flaw);
}
int divergent_barrier() { return start(divergent_barrier_kernel, 1, kThreads, 0); }
int shuffle_with_exited_lane() { return start(exited_lane_kernel, 1, 32, 0); }
int shuffle_outside_mask(float* out) { return start(outside_mask_kernel, 1, 32, 0, out); }
int load_vector(const float* data, float* out) {
  return start(load_vector_kernel, 1, 1, 0, data, out);
}
int too_much_shared() { return start(huge_shared_kernel, 1, 1, 0); }
int read_unwritten_shared(std::uint32_t* out) {
  return start(unwritten_shared_kernel, 1, kThreads, 0, out);
}
int collectives(std::uint32_t* out) { return start(collectives_kernel, 1, kThreads, 0, out); }
int trace(std::uint32_t* sequence, std::uint32_t* length, unsigned blocks) {
  return start(trace_kernel, blocks, 32, 0, sequence, length);
}
int launch_shape(unsigned blocks, unsigned threads, std::size_t shared_bytes) {
  return start(nothing_kernel, blocks, threads, shared_bytes);
}
int launch_large_arguments() { return start(large_arguments_kernel, 1, 1, 0, LargeArguments{}); }

}  // namespace cuda_on_cpu::planted
