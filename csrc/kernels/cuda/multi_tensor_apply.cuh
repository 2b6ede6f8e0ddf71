// SPDX-License-Identifier: BSD-3-Clause
// The CUDA driver of elementwise optimizers: K2 of the step for any functor and dtype tuple.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/alignment.h"
#include "kernels/cuda/fused_update_kernel.cuh"
#include "kernels/cuda/group_slots.cuh"
#include "kernels/cuda/launch_table.cuh"
#include "kernels/cuda/mixed_update_kernel.cuh"
#include "kernels/cuda/update_types.cuh"
#include "kernels/fused_optimizer.h"

namespace torchfuse::kernels::cuda {

/// Fills launches with the rows that are aligned, or with those that are not, and enqueues them.
template <class Types>
class UpdateLauncher {
  using Row = typename Types::Row;
  using Storage = typename Types::Storage;
  static constexpr int kMasterStream = Types::kStateStream + Types::kStates;

 public:
  using Functor = typename Types::Functor;
  using Params = typename Types::Params;

  UpdateLauncher(const UpdateArgs<Functor>& args, Stream stream)
      : args_(args),
        stream_(stream),
        chunk_(choose_chunk(args.tensors.total(), kThreads * Types::kVec)) {
    static_cast<Storage&>(launch_) = Storage(args.tensors);
    launch_.scalars = args.scalars;
    launch_.write_back_grads = args.write_back_grads;
  }

  /// Enqueues all rows that are `aligned` or not; sets `others` if there are rows of the other
  /// kind.
  Status run(bool aligned, bool* others) {
    aligned_ = aligned;
    reset();
    const Status status = for_each_row(args_.tensors, [&](std::int64_t i) {
      const TensorRow& row = args_.tensors.rows[i];
      const Row entry = entry_of(i);
      const Peeling peeling = peeling_of(entry, args_.groups[row.group]);
      if (peeling.aligned == aligned) return add(entry, row.group, peeling.head);
      *others = true;
      return Status{};
    });
    return status.ok() ? flush() : status;
  }

 private:
  void reset() {
    launch_.table.reset(chunk_);
    groups_.reset();
  }

  Status add(const Row& entry, std::int32_t group, std::uint32_t head) {
    int slot = launch_.table.full() ? -1 : groups_.place(args_.groups, group, launch_.groups);
    if (slot < 0) {
      const Status status = flush();
      if (!status.ok()) return status;
      slot = groups_.place(args_.groups, group, launch_.groups);
    }
    const int index = launch_.table.append(entry);
    launch_.group[index] = static_cast<std::uint8_t>(slot);
    launch_.head[index] = static_cast<std::uint8_t>(head);
    return Status{};
  }

  Status flush() {
    if (launch_.table.count == 0) return Status{};
    const Status status = launch(kernel(), launch_, launch_.table.blocks, kThreads, stream_,
                                 "launch of fused_update_kernel");
    reset();
    return status;
  }

  auto kernel() const {
    if constexpr (std::is_same_v<Types, MixedTypes<Functor>>) {
      return aligned_ ? fused_update_mixed_kernel<Functor, true>
                      : fused_update_mixed_kernel<Functor, false>;
    } else {
      return aligned_ ? fused_update_kernel<Types, true> : fused_update_kernel<Types, false>;
    }
  }

  Row entry_of(std::int64_t i) const {
    const TensorRow& row = args_.tensors.rows[i];
    Row entry;
    set_streams<Types>(row, entry.streams);
    entry.step = row.step;
    entry.numel = row.numel;
    if constexpr (requires { entry.index; }) entry.index = row.index;
    if constexpr (Layerwise<Functor>) entry.norms = args_.norms + i * Functor::kNumNorms;
    return entry;
  }

  Peeling peeling_of(const Row& row, const Params& params) const {
    const Storage& storage = launch_;
    StreamAccess accesses[Types::kStreams];
    int count = 0;
    for (int s = 0; s < Types::kStreams; ++s) {
      const int state = s - Types::kStateStream;
      const bool is_state = state >= 0 && state < Types::kStates;
      if (is_state && !Functor::uses_state(params, state)) continue;
      if (!storage.has_stream(s)) continue;
      const bool read_only = s == Types::kGradStream && !args_.write_back_grads;
      const bool write_only = s == Types::kParamStream && storage.has_master();
      accesses[count++] = {reinterpret_cast<std::uintptr_t>(row.streams[s]),
                           storage.element_size(s), read_only || write_only ? 1u : 2u};
    }
    return best_peeling(accesses, count, Types::kVec);
  }

  const UpdateArgs<Functor>& args_;
  Stream stream_;
  std::uint32_t chunk_;
  bool aligned_ = true;
  UpdateLaunch<Types> launch_{};
  GroupSlots<Params> groups_;
};

template <class Types>
Status enqueue_updates(const UpdateArgs<typename Types::Functor>& args, Stream stream) {
  UpdateLauncher<Types> launcher(args, stream);
  bool misaligned = false;
  bool unused = false;
  const Status status = launcher.run(true, &misaligned);
  return status.ok() && misaligned ? launcher.run(false, &unused) : status;
}

/// The update of tables whose parameters are in the 16-bit `Param`. See Note [One object per 16-bit
/// type].
template <class Functor, class Param>
Status update_half_width(const UpdateArgs<Functor>& args, Stream stream) {
  return dispatch_half_width<Functor, Param>(
      args.tensors, [&](auto types) { return enqueue_updates<decltype(types)>(args, stream); });
}

}  // namespace torchfuse::kernels::cuda

namespace torchfuse::kernels {

template <class Functor>
Status fused_update_cuda(const UpdateArgs<Functor>& args, Stream stream) {
  return cuda::dispatch_update<Functor>(
      args.tensors,
      [&](auto types) { return cuda::enqueue_updates<decltype(types)>(args, stream); },
      [&](auto param) { return cuda::update_half_width<Functor, decltype(param)>(args, stream); });
}

}  // namespace torchfuse::kernels
