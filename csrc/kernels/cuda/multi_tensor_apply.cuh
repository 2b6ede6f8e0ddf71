// SPDX-License-Identifier: BSD-3-Clause
// The CUDA driver of elementwise optimizers: K2 of the step for any functor and dtype tuple.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "kernels/common/shared.h"
#include "kernels/cuda/alignment.h"
#include "kernels/cuda/launch_table.cuh"
#include "kernels/cuda/update_types.cuh"
#include "kernels/cuda/vec.cuh"
#include "kernels/fused_optimizer.h"

namespace torchfuse::kernels::cuda {

/// What the elements of one chunk share. Streams point to the chunk's first element.
template <class Types>
struct UpdateChunk {
  unsigned char* streams[Types::kStreams];
  bool uses_state[Types::kStates];
  bool write_back_grads;
  typename Types::Compute grad_coef;
  typename Types::Coefs coefs;
};

/// The width of accesses at `address`. Found anew for every vector where streams are misaligned: three
/// instructions, where widths kept for the loop would cost a register per stream.
template <bool kAligned>
__device__ __forceinline__ std::uint32_t access_width(const unsigned char* address) {
  return kAligned ? kVectorBytes : legal_width(reinterpret_cast<std::uintptr_t>(address));
}

template <bool kAligned, class Types, class S>
__device__ __forceinline__ void fetch(const UpdateChunk<Types>& chunk, int stream,
                                      std::uint32_t index, RawVec<S, Types::kVec>& raw) {
  const unsigned char* address = chunk.streams[stream] + index * sizeof(S);
  load_vec<Keep::kReadOnce>(raw, address, access_width<kAligned>(address));
}

template <bool kAligned, class Types, class S>
__device__ __forceinline__ void put(const UpdateChunk<Types>& chunk, int stream,
                                    std::uint32_t index,
                                    const typename Types::Compute (&values)[Types::kVec],
                                    RawVec<S, Types::kVec>& raw) {
  unsigned char* address = chunk.streams[stream] + index * sizeof(S);
  pack(values, raw);
  store_vec(address, raw, access_width<kAligned>(address));
}

/// The vector that begins at element `index`. All loads are issued before the first value is used.
template <class Types, bool kAligned>
__device__ __forceinline__ void update_vector(const UpdateChunk<Types>& chunk,
                                              std::uint32_t index) {
  using T = typename Types::Compute;
  using Source = typename Types::Source;
  constexpr int kVec = Types::kVec;
  constexpr int kGrad = Types::kGradStream;
  constexpr int kState = Types::kStateStream;
  constexpr int kSource = Types::kSourceStream;
  RawVec<Source, kVec> raw_source;
  RawVec<typename Types::Grad, kVec> raw_grad;
  RawVec<typename Types::State, kVec> raw_state[Types::kStates] = {};
  fetch<kAligned>(chunk, kSource, index, raw_source);
  fetch<kAligned>(chunk, kGrad, index, raw_grad);
#pragma unroll
  for (int k = 0; k < Types::kStates; ++k) {
    if (chunk.uses_state[k]) fetch<kAligned>(chunk, kState + k, index, raw_state[k]);
  }

  T param[kVec];
  T grad[kVec];
  T state[Types::kStates][kVec];
  unpack(raw_source, param);
  unpack(raw_grad, grad);
  if (chunk.write_back_grads) {
    // Ahead of the update, and in registers of its own: the update need not keep what it multiplies.
    T scaled[kVec];
#pragma unroll
    for (int i = 0; i < kVec; ++i) scaled[i] = grad[i] * chunk.grad_coef;
    RawVec<typename Types::Grad, kVec> raw_scaled;
    put<kAligned>(chunk, kGrad, index, scaled, raw_scaled);
  }
#pragma unroll
  for (int k = 0; k < Types::kStates; ++k) unpack(raw_state[k], state[k]);
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    T element_state[Types::kStates];
#pragma unroll
    for (int k = 0; k < Types::kStates; ++k) element_state[k] = state[k][i];
    Types::Functor::update(param[i], grad[i] * chunk.grad_coef, element_state, chunk.coefs);
#pragma unroll
    for (int k = 0; k < Types::kStates; ++k) state[k][i] = element_state[k];
  }

  RawVec<typename Types::Param, kVec> raw_param;
  put<kAligned>(chunk, Types::kParamStream, index, param, raw_param);
  if constexpr (Types::kMaster) put<kAligned>(chunk, kSource, index, param, raw_source);
#pragma unroll
  for (int k = 0; k < Types::kStates; ++k) {
    if (chunk.uses_state[k]) put<kAligned>(chunk, kState + k, index, state[k], raw_state[k]);
  }
}

/// Element `index` by itself, in front of or behind the vectors.
template <class Types>
__device__ __forceinline__ void update_single(const UpdateChunk<Types>& chunk,
                                              std::uint32_t index) {
  using T = typename Types::Compute;
  using Source = typename Types::Source;
  using State = typename Types::State;
  constexpr int kState = Types::kStateStream;
  T param = load_element<Source>(chunk.streams[Types::kSourceStream], index);
  const T grad = load_element<typename Types::Grad>(chunk.streams[Types::kGradStream], index) *
                 chunk.grad_coef;
  T state[Types::kStates];
#pragma unroll
  for (int k = 0; k < Types::kStates; ++k) {
    state[k] = T(0);
    if (chunk.uses_state[k]) state[k] = load_element<State>(chunk.streams[kState + k], index);
  }
  Types::Functor::update(param, grad, state, chunk.coefs);
  store_element<typename Types::Param>(chunk.streams[Types::kParamStream], index, param);
  if constexpr (Types::kMaster) {
    store_element<Source>(chunk.streams[Types::kSourceStream], index, param);
  }
#pragma unroll
  for (int k = 0; k < Types::kStates; ++k) {
    if (chunk.uses_state[k]) store_element<State>(chunk.streams[kState + k], index, state[k]);
  }
  if (chunk.write_back_grads) {
    store_element<typename Types::Grad>(chunk.streams[Types::kGradStream], index, grad);
  }
}

/// The calling thread's share of a chunk. See Note [Peeling].
template <class Types>
__device__ __forceinline__ void update_chunk(const UpdateChunk<Types>& chunk,
                                             const RowShare& share, std::uint32_t wanted_head) {
  constexpr std::uint32_t kVec = Types::kVec;
  const std::uint32_t head = wanted_head < share.count ? wanted_head : share.count;
  const std::uint32_t vectors = (share.count - head) / kVec;
  std::uintptr_t low_bits = 0;
#pragma unroll
  for (int s = 0; s < Types::kStreams; ++s) {
    low_bits |= reinterpret_cast<std::uintptr_t>(chunk.streams[s]) + head * Types::element_size(s);
  }
  if (legal_width(low_bits) == kVectorBytes) {
#pragma unroll 1
    for (std::uint32_t i = share.rank; i < vectors; i += share.size) {
      update_vector<Types, true>(chunk, head + i * kVec);
    }
  } else {
#pragma unroll 1
    for (std::uint32_t i = share.rank; i < vectors; i += share.size) {
      update_vector<Types, false>(chunk, head + i * kVec);
    }
  }
  const std::uint32_t behind = head + vectors * kVec;
  const std::uint32_t singles = head + (share.count - behind);
  if (share.rank < singles) {
    update_single(chunk, share.rank < head ? share.rank : behind + (share.rank - head));
  }
}

template <class Types>
struct UpdateShared {
  typename Types::Coefs coefs[kWarps];  ///< by team
};

// A block handles one chunk of a parameter, a warp one small parameter. Bytes per element: the sum of
// the streams, read once (and, but for the gradient, written once): fp32 Adam 16 + 12. One thread of
// each team computes what its elements share, in fp64. 16-byte accesses for every stream, whatever its
// type; misaligned streams as in Note [Peeling].
template <class Types>
__global__ void __launch_bounds__(kThreads, Types::kBlocksPerSm)
    fused_update_kernel(const __grid_constant__ UpdateLaunch<Types> launch) {
  using Functor = typename Types::Functor;
  using T = typename Types::Compute;
  if (launch.scalars->skip != 0.0f) return;
  UpdateShared<Types>& shared = block_shared<UpdateShared<Types>>();
  const RowShare share = row_share(launch.table);
  if (share.row >= 0 && share.rank == 0) {
    shared.coefs[share.team] = Functor::template prepare<T>(
        launch.groups[launch.group[share.row]],
        static_cast<double>(*launch.table.rows[share.row].step));
  }
  __syncthreads();
  if (share.row < 0) return;

  const auto& row = launch.table.rows[share.row];
  const typename Types::Params& params = launch.groups[launch.group[share.row]];
  UpdateChunk<Types> chunk;
#pragma unroll
  for (int s = 0; s < Types::kStreams; ++s) {
    chunk.streams[s] = static_cast<unsigned char*>(row.streams[s]) +
                       share.begin * static_cast<std::int64_t>(Types::element_size(s));
  }
#pragma unroll
  for (int k = 0; k < Types::kStates; ++k) {
    chunk.uses_state[k] = Functor::uses_state(params, k);
    // Keeps a stream that is not touched out of the question whether all are aligned.
    if (!chunk.uses_state[k]) chunk.streams[Types::kStateStream + k] = chunk.streams[0];
  }
  chunk.write_back_grads = launch.write_back_grads;
  chunk.grad_coef = static_cast<T>(launch.scalars->grad_coef);
  chunk.coefs = shared.coefs[share.team];
  update_chunk(chunk, share, launch.head[share.row]);
}

/// Fills launches with rows and enqueues those that are full.
template <class Types>
class UpdateLauncher {
 public:
  using Functor = typename Types::Functor;

  UpdateLauncher(const UpdateArgs<Functor>& args, Stream stream) : args_(args), stream_(stream) {
    launch_.scalars = args.scalars;
    launch_.write_back_grads = args.write_back_grads;
    reset();
  }

  Status add(const TensorRow& row) {
    int slot = group_slot(row.group);
    if (launch_.table.full() || slot == kMaxGroups<typename Types::Params>) {
      const Status status = flush();
      if (!status.ok()) return status;
      slot = group_slot(row.group);
    }
    if (slot == num_groups_) {
      launch_.groups[slot] = args_.groups[row.group];
      group_ids_[slot] = row.group;
      ++num_groups_;
    }
    last_slot_ = slot;
    UpdateRow<Types::kStreams> entry;
    entry.streams[Types::kParamStream] = row.param;
    entry.streams[Types::kGradStream] = row.grad;
    for (int k = 0; k < Types::kStates; ++k) {
      entry.streams[Types::kStateStream + k] = row.state[k];
    }
    if (Types::kMaster) entry.streams[Types::kSourceStream] = row.master;
    entry.step = row.step;
    entry.numel = row.numel;
    const int index = launch_.table.append(entry);
    launch_.group[index] = static_cast<std::uint8_t>(slot);
    launch_.head[index] = head_of(entry, args_.groups[row.group]);
    return Status{};
  }

  Status flush() {
    if (launch_.table.count == 0) return Status{};
    const Status status = launch(fused_update_kernel<Types>, launch_, launch_.table.blocks,
                                 kThreads, stream_, "launch of fused_update_kernel");
    reset();
    return status;
  }

 private:
  void reset() {
    launch_.table.reset(choose_chunk(args_.tensors.total(), kThreads * Types::kVec));
    num_groups_ = 0;
    last_slot_ = 0;
  }

  /// Where the group stands in the launch: num_groups_ if it has yet to be entered.
  int group_slot(std::int32_t group) const {
    if (last_slot_ < num_groups_ && group_ids_[last_slot_] == group) return last_slot_;
    int slot = 0;
    while (slot < num_groups_ && group_ids_[slot] != group) ++slot;
    return slot;
  }

  std::uint8_t head_of(const UpdateRow<Types::kStreams>& row,
                       const typename Types::Params& params) const {
    StreamAccess accesses[Types::kStreams];
    int count = 0;
    for (int s = 0; s < Types::kStreams; ++s) {
      const int state = s - Types::kStateStream;
      const bool is_state = state >= 0 && state < Types::kStates;
      if (is_state && !Functor::uses_state(params, state)) continue;
      const bool read_only = s == Types::kGradStream && !args_.write_back_grads;
      const bool write_only = s == Types::kParamStream && Types::kMaster;
      accesses[count++] = {reinterpret_cast<std::uintptr_t>(row.streams[s]),
                           Types::element_size(s), read_only || write_only ? 1u : 2u};
    }
    return static_cast<std::uint8_t>(best_head(accesses, count, Types::kVec));
  }

  const UpdateArgs<Functor>& args_;
  Stream stream_;
  UpdateLaunch<Types> launch_{};
  std::int32_t group_ids_[kMaxGroups<typename Types::Params>] = {};
  int num_groups_ = 0;
  int last_slot_ = 0;
};

template <class Types>
Status enqueue_updates(const UpdateArgs<typename Types::Functor>& args, Stream stream) {
  UpdateLauncher<Types> launcher(args, stream);
  const Status status = for_each_row(
      args.tensors, [&](std::int64_t i) { return launcher.add(args.tensors.rows[i]); });
  return status.ok() ? launcher.flush() : status;
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
