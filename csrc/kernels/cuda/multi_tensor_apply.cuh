// SPDX-License-Identifier: BSD-3-Clause
// The CUDA driver of elementwise optimizers: K2 of the step for any functor and dtype tuple.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/alignment.h"
#include "kernels/cuda/fused_update_kernel.cuh"
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
      const Row entry = entry_of(row);
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
    num_groups_ = 0;
    last_slot_ = 0;
  }

  Status add(const Row& entry, std::int32_t group, std::uint32_t head) {
    int slot = group_slot(group);
    if (launch_.table.full() || slot == kMaxGroups<Params>) {
      const Status status = flush();
      if (!status.ok()) return status;
      slot = group_slot(group);
    }
    if (slot == num_groups_) {
      launch_.groups[slot] = args_.groups[group];
      group_ids_[slot] = group;
      ++num_groups_;
    }
    last_slot_ = slot;
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

  /// Where the group stands in the launch: num_groups_ if it has yet to be entered.
  int group_slot(std::int32_t group) const {
    if (last_slot_ < num_groups_ && group_ids_[last_slot_] == group) return last_slot_;
    int slot = 0;
    while (slot < num_groups_ && group_ids_[slot] != group) ++slot;
    return slot;
  }

  static Row entry_of(const TensorRow& row) {
    Row entry;
    entry.streams[Types::kParamStream] = row.param;
    entry.streams[Types::kGradStream] = row.grad;
    for (int k = 0; k < Types::kStates; ++k) {
      entry.streams[Types::kStateStream + k] = row.state[k];
    }
    if constexpr (Types::kStreams > kMasterStream) entry.streams[kMasterStream] = row.master;
    entry.step = row.step;
    entry.numel = row.numel;
    if constexpr (requires { entry.index; }) entry.index = row.index;
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
      if (s == kMasterStream && !storage.has_master() && !storage.has_remainder()) continue;
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
  std::int32_t group_ids_[kMaxGroups<Params>] = {};
  int num_groups_ = 0;
  int last_slot_ = 0;
};

template <class Types>
Status enqueue_updates(const UpdateArgs<typename Types::Functor>& args, Stream stream) {
  UpdateLauncher<Types> launcher(args, stream);
  bool misaligned = false;
  bool unused = false;
  const Status status = launcher.run(true, &misaligned);
  return status.ok() && misaligned ? launcher.run(false, &unused) : status;
}

}  // namespace torchfuse::kernels::cuda

namespace torchfuse::kernels {

template <class Functor>
Status fused_update_cuda(const UpdateArgs<Functor>& args, Stream stream) {
  return cuda::dispatch_update<Functor>(args.tensors, [&](auto types) {
    return cuda::enqueue_updates<decltype(types)>(args, stream);
  });
}

}  // namespace torchfuse::kernels
