// SPDX-License-Identifier: BSD-3-Clause
// The norms phase computes norms from the partials of a tensor's chunks. See Note [Layerwise
// optimizers].
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/step_scalars.h"
#include "kernels/cuda/block_reduce.cuh"
#include "kernels/cuda/group_table.cuh"
#include "kernels/cuda/launch_table.cuh"
#include "kernels/layerwise_optimizer.h"

namespace torchfuse::kernels::cuda {

struct NormsRow {
  const MeasurePartial* partials;
  std::int64_t num_chunks;
  float* step;
  void* tensor_state;
  double* norms;
  MeasurePartial* sums;  ///< written instead of the norms, if not null
};

template <class Functor>
struct NormsLaunch {
  using Params = typename Functor::Params;
  static constexpr int kGroups = kMaxGroups<Params>;
  /// Each row also has a group.
  static constexpr int kRows =
      table_capacity(sizeof(NormsRow) + 1, kGroups * sizeof(Params) + 2 * sizeof(void*));

  NormsRow rows[kRows];
  Params groups[kGroups];
  const StepScalars* scalars;
  std::int32_t num_rows;
  std::uint8_t group[kRows];

  void reset() { num_rows = 0; }
  bool full() const { return num_rows == kRows; }
  std::int32_t count() const { return num_rows; }
  void append(const NormsRow& row, std::uint8_t group_place, std::uint8_t /*head*/) {
    rows[num_rows] = row;
    group[num_rows++] = group_place;
  }
};

// A block handles a tensor: sums the partials (32 bytes each) and writes the norms. Each thread
// sums every 256th partial in order. T is the type of the state per tensor. No alignment beyond the
// types' own.
template <class Functor, class T>
__global__ void __launch_bounds__(kThreads)
    tensor_norms_kernel(const NormsLaunch<Functor> __grid_constant__ launch) {
  constexpr int kNorms = Functor::kNumNorms;
  if (launch.scalars->skip != 0.0f) return;
  const NormsRow& row = launch.rows[blockIdx.x];
  MeasurePartial sums[kNorms];
#pragma unroll
  for (int n = 0; n < kNorms; ++n) {
    if (n > 0) __syncthreads();
    MeasurePartial sum{};
    for (std::int64_t i = threadIdx.x; i < row.num_chunks; i += kThreads) {
      sum = sum + row.partials[i * kNorms + n];
    }
    sums[n] = block_sum(sum);
  }
  if (threadIdx.x != 0) return;
  if (row.sums != nullptr) {
#pragma unroll
    for (int n = 0; n < kNorms; ++n) row.sums[n] = sums[n];
    return;
  }
  finish_norms<Functor, T>(launch.groups[launch.group[blockIdx.x]], static_cast<double>(*row.step),
                           sums, row.tensor_state, row.norms);
}

template <class Functor, class T>
Status enqueue_norms(const MeasureArgs<Functor>& args, Stream stream) {
  constexpr int kNorms = Functor::kNumNorms;
  const auto& update = args.update;
  NormsLaunch<Functor> launch{};
  launch.scalars = update.scalars;
  LaunchFiller filler(launch, update.groups, [&](const NormsLaunch<Functor>& full) {
    return kernels::cuda::launch(tensor_norms_kernel<Functor, T>, full,
                                 static_cast<std::uint32_t>(full.count()), kThreads, stream,
                                 "launch of tensor_norms_kernel");
  });
  for (std::int64_t i = 0; i < update.tensors.count; ++i) {
    const TensorRow& tensor = update.tensors.rows[i];
    const std::int64_t first_chunk = args.chunk_offsets[i];
    const NormsRow row = {args.partials + first_chunk * kNorms,
                          args.chunk_offsets[i + 1] - first_chunk,
                          tensor.step,
                          tensor.tensor_state,
                          args.norms + i * kNorms,
                          args.sums == nullptr ? nullptr : args.sums + i * kNorms};
    const Status status = filler.add(row, tensor.group);
    if (!status.ok()) return status;
  }
  return filler.flush();
}

}  // namespace torchfuse::kernels::cuda

namespace torchfuse::kernels {

template <class Functor>
Status tensor_norms_cuda(const MeasureArgs<Functor>& args, Stream stream) {
  const bool wide = args.update.tensors.param == DType::kFloat64;
  return wide ? cuda::enqueue_norms<Functor, double>(args, stream)
              : cuda::enqueue_norms<Functor, float>(args, stream);
}

}  // namespace torchfuse::kernels
