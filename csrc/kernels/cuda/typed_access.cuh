// SPDX-License-Identifier: BSD-3-Clause
// Access to operands whose storage types are known at compile time.
//
// Note [Access policies]
// The kernels in fused_kernels.cuh process operands: parameter, gradient, states, master. An access
// policy defines how the operands' elements are stored:
//
//   TypedAccess      all types are template arguments: one kernel for each tuple of them
//   LookedUpAccess   one kernel for all other tuples, which looks the types up as it runs
//
// A policy first loads stored bits, so that the loads of all operands are in flight together. The
// policy then converts kGroup elements at a time: a pair, so that few converted values are alive,
// four that are divided together, or a full vector, so that the type is looked up once.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "kernels/common/dtype.h"
#include "kernels/common/float16.h"
#include "kernels/common/tensor_table.h"
#include "kernels/cuda/alignment.h"
#include "kernels/cuda/vec.cuh"
#include "kernels/fused_optimizer.h"

namespace torchfuse::kernels::cuda {

template <class Functor_, class Param_, class Grad_, class State_, bool kMaster_>
struct TypedAccess {
  using Functor = Functor_;
  using Param = Param_;
  using Grad = Grad_;
  using State = State_;
  using Compute = std::conditional_t<std::is_same_v<Param, double>, double, float>;
  static constexpr bool kMaster = kMaster_;
  using Source = std::conditional_t<kMaster, float, Param>;  ///< storage of the old value

  static constexpr int kStates = Functor::kNumStates;
  static constexpr int kParamOperand = 0;
  static constexpr int kGradOperand = 1;
  static constexpr int kStateOperand = 2;  ///< first of kStates operands
  static constexpr int kSourceOperand = kMaster ? kStateOperand + kStates : kParamOperand;
  static constexpr int kOperands = kStateOperand + kStates + (kMaster ? 1 : 0);

  /// Elements per vector: 16 bytes of the narrowest operand.
  static constexpr int kVec =
      kVectorBytes /
      (sizeof(Param) == 2 || sizeof(Grad) == 2 || sizeof(State) == 2 ? 2 : sizeof(Param));
  static constexpr int kGroup = Divides<Functor> && kVec >= 4 ? 4 : 2;

  using RawSource = RawVec<Source, kVec>;
  using RawGrad = RawVec<Grad, kVec>;
  using RawState = RawVec<State, kVec>;

  /// Bytes that a thread has in flight if all states are used.
  static constexpr int kLoadBytes =
      kVec * static_cast<int>(sizeof(Source) + sizeof(Grad) + kStates * sizeof(State));
  /// Resident blocks per multiprocessor in the register budget: the maximum without spills on every
  /// architecture. With three states, only Adam's, fewer loads fit. 40 to 96 KB of loads are in
  /// flight.
  static constexpr int kUpdateBlocksPerSm =
      sizeof(Compute) == 8 || kLoadBytes >= (kStates == 3 ? 96 : 128) ? 2
      : kVec == 4                                                     ? 4
                                                                      : 3;
  static constexpr int kMeasureBlocksPerSm = kVec == 4 ? 3 : 2;
  /// Whether a measure has a separate loop for aligned rows. The loop saves an eighth of the
  /// instructions with seven accesses, and little with two. With 16-bit operands it would cost a
  /// resident block.
  static constexpr bool kAlignedMeasure = kStatesInMeasure<Functor> && kVec == 4;

  /// A launch's data about its operands besides addresses: none, because all types are known.
  struct Storage {
    Storage() = default;
    explicit Storage(const TensorTable&) {}
    TORCHFUSE_HOST_DEVICE static constexpr std::uint32_t element_size(int operand) {
      if (operand == kParamOperand) return sizeof(Param);
      if (operand == kGradOperand) return sizeof(Grad);
      if (operand == kSourceOperand) return sizeof(Source);
      return sizeof(State);
    }
    TORCHFUSE_HOST_DEVICE static constexpr bool has_master() { return kMaster; }
    TORCHFUSE_HOST_DEVICE static constexpr bool has_operand(int) { return true; }
  };
  /// Additional data per row, team and chunk: none.
  struct RowData {
    TORCHFUSE_HOST_DEVICE void set(const TensorRow&) {}
  };
  struct TeamData {
    __device__ void set(const Storage&, const RowData&, std::int64_t, float) {}
  };
  struct ChunkData {
    __device__ void set(const Storage&) {}
  };

  // --- Vectors
  // -------------------------------------------------------------------------------------

  template <bool kAligned, class Chunk, class S>
  __device__ __forceinline__ static void load(const Chunk& chunk, int operand, std::uint32_t index,
                                              RawVec<S, kVec>& raw) {
    const unsigned char* address = chunk.operands[operand] + byte_offset<S>(index);
    load_vec<Keep::kStream>(raw, address, access_width<kAligned>(address));
  }

  template <bool kAligned, class Chunk, class S>
  __device__ __forceinline__ static void store(const Chunk& chunk, int operand, std::uint32_t index,
                                               const RawVec<S, kVec>& raw) {
    unsigned char* address = chunk.operands[operand] + byte_offset<S>(index);
    store_vec<Keep::kStream>(address, raw, access_width<kAligned>(address));
  }

  template <bool kAligned, class Chunk>
  __device__ __forceinline__ static void load_source(const Chunk& chunk, std::uint32_t index,
                                                     RawSource& raw) {
    load<kAligned>(chunk, kSourceOperand, index, raw);
  }

  /// Stores the master, if there is one, and the parameter.
  template <bool kAligned, class Chunk>
  __device__ __forceinline__ static void store_source(const Chunk& chunk, std::uint32_t index,
                                                      const RawSource& raw) {
    store<kAligned>(chunk, kSourceOperand, index, raw);
    if constexpr (kMaster) {
      RawVec<Param, kVec> raw_param;
#pragma unroll
      for (int pair = 0; pair < kVec / 2; ++pair) {
        Compute values[2];
        get_pair(raw, pair, values);
        set_pair(raw_param, pair, values);
      }
      store<kAligned>(chunk, kParamOperand, index, raw_param);
    }
  }

  template <class Chunk>
  __device__ __forceinline__ static void get_source(const Chunk&, const RawSource& raw, int group,
                                                    Compute (&values)[kGroup]) {
    get_values(raw, group * kGroup, values);
  }

  template <class Chunk, class S>
  __device__ __forceinline__ static void get(const Chunk&, int /*operand*/,
                                             const RawVec<S, kVec>& raw, int group,
                                             Compute (&values)[kGroup]) {
    get_values(raw, group * kGroup, values);
  }

  template <class S>
  __device__ __forceinline__ static void set(RawVec<S, kVec>& raw, int group,
                                             const Compute (&values)[kGroup]) {
    set_values(raw, group * kGroup, values);
  }

  // --- Elements
  // ------------------------------------------------------------------------------------

  template <class S, class Chunk>
  __device__ __forceinline__ static Compute load_one(const Chunk& chunk, int operand,
                                                     std::uint32_t index) {
    return load_element<S>(chunk.operands[operand], index);
  }

  template <class S, class Chunk>
  __device__ __forceinline__ static void store_one(const Chunk& chunk, int operand,
                                                   std::uint32_t index, Compute value) {
    store_element<S>(chunk.operands[operand], index, value);
  }

  /// Returns a state's value as rounded to storage.
  template <class Chunk>
  __device__ __forceinline__ static Compute stored(const Chunk&, int /*operand*/, Compute value) {
    if constexpr (sizeof(State) == sizeof(Compute)) return value;
    State narrowed;
    narrow(value, narrowed);
    return static_cast<Compute>(widen(narrowed));
  }

  template <class Chunk>
  __device__ __forceinline__ static Compute load_source_one(const Chunk& chunk,
                                                            std::uint32_t index) {
    return load_element<Source>(chunk.operands[kSourceOperand], index);
  }

  template <class Chunk>
  __device__ __forceinline__ static void store_source_one(const Chunk& chunk, std::uint32_t index,
                                                          Compute value) {
    store_element<Param>(chunk.operands[kParamOperand], index, value);
    if constexpr (kMaster) store_element<Source>(chunk.operands[kSourceOperand], index, value);
  }
};

}  // namespace torchfuse::kernels::cuda
