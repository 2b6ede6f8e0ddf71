// SPDX-License-Identifier: BSD-3-Clause
// The CUDA driver of the measure and norms phases, for any functor and dtype tuple.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/group_slots.cuh"
#include "kernels/cuda/launch_table.cuh"
#include "kernels/cuda/layerwise_kernels.cuh"
#include "kernels/cuda/update_types.cuh"
#include "kernels/layerwise_optimizer.h"

namespace torchfuse::kernels::cuda {

template <class Types>
Status enqueue_measure(const MeasureArgs<typename Types::Functor>& args, Stream stream) {
  using Launch = MeasureLaunch<Types>;
  const auto& update = args.update;
  GroupSlots<typename Types::Params> groups;
  Launch arguments{};
  static_cast<typename Types::Storage&>(arguments) = typename Types::Storage(update.tensors);
  arguments.scalars = update.scalars;
  arguments.partials = args.partials;
  arguments.write_back_grads = update.write_back_grads;
  const auto reset = [&] {
    arguments.table.reset(static_cast<std::uint32_t>(kNormChunk));
    groups.reset();
  };
  const auto flush = [&]() -> Status {
    if (arguments.table.count == 0) return Status{};
    const Status status = launch(fused_measure_kernel<Types>, arguments, arguments.table.blocks,
                                 kThreads, stream, "launch of fused_measure_kernel");
    reset();
    return status;
  };
  reset();
  const Status status = for_each_row(update.tensors, [&](std::int64_t i) {
    const TensorRow& row = update.tensors.rows[i];
    typename Launch::Row entry;
    set_streams<Types>(row, entry.streams);
    entry.step = row.step;
    entry.numel = row.numel;
    entry.slot = args.slots[i];
    int slot =
        arguments.table.full() ? -1 : groups.place(update.groups, row.group, arguments.groups);
    if (slot < 0) {
      const Status flushed = flush();
      if (!flushed.ok()) return flushed;
      slot = groups.place(update.groups, row.group, arguments.groups);
    }
    arguments.group[arguments.table.append(entry)] = static_cast<std::uint8_t>(slot);
    return Status{};
  });
  return status.ok() ? flush() : status;
}

template <class Functor, class T>
Status enqueue_norms(const MeasureArgs<Functor>& args, Stream stream) {
  using Launch = NormsLaunch<Functor>;
  const auto& update = args.update;
  GroupSlots<typename Functor::Params> groups;
  Launch arguments{};
  arguments.scalars = update.scalars;
  arguments.partials = args.partials;
  const auto flush = [&]() -> Status {
    if (arguments.count == 0) return Status{};
    const Status status = launch(tensor_norms_kernel<Functor, T>, arguments,
                                 static_cast<std::uint32_t>(arguments.count), kThreads, stream,
                                 "launch of tensor_norms_kernel");
    arguments.count = 0;
    groups.reset();
    return status;
  };
  for (std::int64_t i = 0; i < update.tensors.count; ++i) {
    const TensorRow& row = update.tensors.rows[i];
    int slot = arguments.count == Launch::kRows
                   ? -1
                   : groups.place(update.groups, row.group, arguments.groups);
    if (slot < 0) {
      const Status flushed = flush();
      if (!flushed.ok()) return flushed;
      slot = groups.place(update.groups, row.group, arguments.groups);
    }
    const std::int64_t first = i * Functor::kNumNorms;
    arguments.rows[arguments.count] = {
        args.slots[i],      args.slots[i + 1] - args.slots[i],
        row.step,           row.tensor_state,
        args.norms + first, args.sums == nullptr ? nullptr : args.sums + first};
    arguments.group[arguments.count++] = static_cast<std::uint8_t>(slot);
  }
  return flush();
}

/// The measure phase of tables whose parameters are in the 16-bit `Param`. See Note [One object per
/// 16-bit type].
template <class Functor, class Param>
Status measure_half_width(const MeasureArgs<Functor>& args, Stream stream) {
  return dispatch_half_width<Functor, Param>(args.update.tensors, [&](auto types) {
    return enqueue_measure<decltype(types)>(args, stream);
  });
}

}  // namespace torchfuse::kernels::cuda

namespace torchfuse::kernels {

template <class Functor>
Status fused_measure_cuda(const MeasureArgs<Functor>& args, Stream stream) {
  const Status status = cuda::dispatch_update<Functor>(
      args.update.tensors,
      [&](auto types) { return cuda::enqueue_measure<decltype(types)>(args, stream); },
      [&](auto param) { return cuda::measure_half_width<Functor, decltype(param)>(args, stream); });
  return status.ok() ? tensor_norms_cuda(args, stream) : status;
}

template <class Functor>
Status tensor_norms_cuda(const MeasureArgs<Functor>& args, Stream stream) {
  const bool wide = args.update.tensors.param == DType::kFloat64;
  return wide ? cuda::enqueue_norms<Functor, double>(args, stream)
              : cuda::enqueue_norms<Functor, float>(args, stream);
}

}  // namespace torchfuse::kernels
