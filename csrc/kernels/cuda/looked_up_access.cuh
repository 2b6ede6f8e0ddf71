// SPDX-License-Identifier: BSD-3-Clause
// Access to operands whose storage types are looked up at run time. See Note [Access policies] in
// typed_access.cuh.
//
// Note [Mixed storage]
// Parameters, gradients, masters and each state may have one of three storage types. Kernels for
// all combinations would be hundreds. The combinations that most programs use have separate
// kernels, with all types known at compile time. For all other combinations, one kernel per functor
// and phase looks up each operand's type. All threads on the device take the same branch, and the
// loads beside it take a hundred times as long.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/common/float16.h"
#include "kernels/common/param_remainder.h"
#include "kernels/common/stochastic_rounding.h"
#include "kernels/common/tensor_table.h"
#include "kernels/cuda/looked_up_vec.cuh"
#include "kernels/cuda/vec.cuh"

namespace torchfuse::kernels::cuda {

template <class Functor_>
struct LookedUpAccess {
  using Functor = Functor_;
  using Compute = float;
  struct Grad {};   ///< the type is looked up
  struct State {};  ///< the type is looked up

  static constexpr int kStates = Functor::kNumStates;
  static constexpr int kParamOperand = 0;
  static constexpr int kGradOperand = 1;
  static constexpr int kStateOperand = 2;  ///< first of kStates operands
  static constexpr int kMasterOperand = kStateOperand + kStates;
  static constexpr int kOperands = kMasterOperand + 1;

  /// Elements per vector: 16 bytes of a 16-bit operand. At least one operand has 16 bits.
  static constexpr int kVec = LookedUpVec::kElements;
  static constexpr int kGroup = kVec;
  using RawSource = LookedUpVec;
  using RawGrad = LookedUpVec;
  using RawState = LookedUpVec;
  using Raw16 = RawVec<BFloat16, kVec>;  ///< either 16-bit type

  /// As in TypedAccess. Up to 160 bytes of loads are in flight.
  static constexpr int kUpdateBlocksPerSm = 2;
  static constexpr int kMeasureBlocksPerSm = 1;
  static constexpr bool kAlignedMeasure = false;

  /// The types of a launch's operands, and the rounding of parameters.
  struct Storage {
    DType dtypes[kOperands] = {};
    bool master = false;
    bool remainder = false;
    bool stochastic = false;
    std::uint64_t seed = 0;

    Storage() = default;
    explicit Storage(const TensorTable& table)
        : master(table.has_master),
          remainder(table.has_remainder),
          stochastic(table.stochastic),
          seed(table.seed) {
      dtypes[kParamOperand] = table.param;
      dtypes[kGradOperand] = table.grad;
      for (int k = 0; k < kStates; ++k) dtypes[kStateOperand + k] = table.state[k];
      // A remainder is stored as a 16-bit type and never converted.
      dtypes[kMasterOperand] = remainder ? DType::kBFloat16 : DType::kFloat32;
    }

    TORCHFUSE_HOST_DEVICE std::uint32_t element_size(int operand) const {
      return static_cast<std::uint32_t>(size_of(dtypes[operand]));
    }
    TORCHFUSE_HOST_DEVICE bool has_master() const { return master; }
    TORCHFUSE_HOST_DEVICE bool has_operand(int operand) const {
      return operand != kMasterOperand || master || remainder;
    }
  };
  /// Stochastic rounding needs the parameter's number and the element's number in the parameter.
  struct RowData {
    std::int64_t index;
    ElementNumbers numbers;
    TORCHFUSE_HOST_DEVICE void set(const TensorRow& row) {
      index = row.index;
      numbers = row.numbers;
    }
  };
  struct TeamData {
    RoundingKey rounding;
    ChunkNumbers numbers;
    __device__ void set(const Storage& storage, const RowData& row, std::int64_t begin,
                        float step) {
      rounding = rounding_key(storage.seed, static_cast<std::uint64_t>(row.index),
                              static_cast<std::uint64_t>(step));
      numbers = ChunkNumbers::of(row.numbers, begin);
    }
    __device__ std::uint32_t round(std::uint32_t value, NumberWalk& number) const {
      return round_stochastically(bits_to_float(value), random_16(rounding, number.next())).bits;
    }
  };
  struct ChunkData {
    const Storage* storage;  ///< in the kernel's arguments

    __device__ void set(const Storage& stored) { storage = &stored; }
    __device__ DType dtype(int operand) const { return storage->dtypes[operand]; }
  };

  // --- Vectors
  // -------------------------------------------------------------------------------------

  template <bool kAligned, class Chunk>
  __device__ __forceinline__ static void load(const Chunk& chunk, int operand, std::uint32_t index,
                                              LookedUpVec& raw) {
    load_as<kAligned>(chunk.dtype(operand), chunk.operands[operand], index, raw);
  }

  template <bool kAligned, class Chunk>
  __device__ __forceinline__ static void store(const Chunk& chunk, int operand, std::uint32_t index,
                                               const LookedUpVec& raw) {
    store_as<kAligned>(chunk.dtype(operand), chunk.operands[operand], index, raw);
  }

  /// Loads the value to update: the master in either storage form, or the parameter. A remainder's
  /// words follow the parameter's words.
  template <bool kAligned, class Chunk>
  __device__ __forceinline__ static void load_source(const Chunk& chunk, std::uint32_t index,
                                                     LookedUpVec& raw) {
    if (chunk.storage->master) {
      load_as<kAligned>(DType::kFloat32, chunk.operands[kMasterOperand], index, raw);
      return;
    }
    load<kAligned>(chunk, kParamOperand, index, raw);
    if (chunk.storage->remainder) {
      Raw16 remainders;
      const unsigned char* address = chunk.operands[kMasterOperand] + byte_offset<BFloat16>(index);
      load_vec<Keep::kStream>(remainders, address, access_width<kAligned>(address));
#pragma unroll
      for (int i = 0; i < remainders.kWords; ++i)
        raw.words[remainders.kWords + i] = remainders.words[i];
    }
  }

  template <bool kAligned, class Chunk>
  __device__ __forceinline__ static void store_source(const Chunk& chunk, std::uint32_t index,
                                                      const LookedUpVec& raw) {
    if (chunk.storage->remainder) {
      Raw16 params;
      Raw16 remainders;
#pragma unroll
      for (int i = 0; i < kVec; i += 2) {
        const SplitMaster first = split_master(raw.words[i]);
        const SplitMaster second = split_master(raw.words[i + 1]);
        params.words[i / 2] = first.param | static_cast<std::uint32_t>(second.param) << 16;
        remainders.words[i / 2] = first.remainder | static_cast<std::uint32_t>(second.remainder)
                                                        << 16;
      }
      store_16<kAligned>(chunk.operands[kParamOperand], index, params);
      store_16<kAligned>(chunk.operands[kMasterOperand], index, remainders);
      return;
    }
    if (chunk.storage->stochastic) {
      Raw16 params;
      NumberWalk number(chunk.team->numbers, index);
#pragma unroll
      for (int i = 0; i < kVec; i += 2) {
        const std::uint32_t first = chunk.team->round(raw.words[i], number);
        const std::uint32_t second = chunk.team->round(raw.words[i + 1], number);
        params.words[i / 2] = first | second << 16;
      }
      store_16<kAligned>(chunk.operands[kParamOperand], index, params);
      return;
    }
    if (chunk.storage->master) {
      store_as<kAligned>(DType::kFloat32, chunk.operands[kMasterOperand], index, raw);
    }
    store<kAligned>(chunk, kParamOperand, index, raw);
  }

  template <class Chunk>
  __device__ __forceinline__ static void get_source(const Chunk& chunk, const LookedUpVec& raw,
                                                    int /*group*/, float (&values)[kGroup]) {
    if (!chunk.storage->remainder) {
      const DType param = chunk.dtype(kParamOperand);
      get_as(chunk.storage->master ? DType::kFloat32 : param, raw, values);
      return;
    }
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const int shift = 16 * (i % 2);
      values[i] = bits_to_float(
          join_master({static_cast<std::uint16_t>(raw.words[i / 2] >> shift),
                       static_cast<std::uint16_t>(raw.words[kVec / 2 + i / 2] >> shift)}));
    }
  }

  template <class Chunk>
  __device__ __forceinline__ static void get(const Chunk& chunk, int operand,
                                             const LookedUpVec& raw, int /*group*/,
                                             float (&values)[kGroup]) {
    get_as(chunk.dtype(operand), raw, values);
  }

  __device__ __forceinline__ static void set(LookedUpVec& raw, int /*group*/,
                                             const float (&values)[kGroup]) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) raw.words[i] = float_bits(values[i]);
  }

  // --- Elements
  // ------------------------------------------------------------------------------------

  template <class, class Chunk>
  __device__ __forceinline__ static float load_one(const Chunk& chunk, int operand,
                                                   std::uint32_t index) {
    float value = 0.0f;
    with_type(chunk.dtype(operand), [&](auto element) {
      value = load_element<decltype(element)>(chunk.operands[operand], index);
    });
    return value;
  }

  template <class, class Chunk>
  __device__ __forceinline__ static void store_one(const Chunk& chunk, int operand,
                                                   std::uint32_t index, float value) {
    with_type(chunk.dtype(operand), [&](auto element) {
      store_element<decltype(element)>(chunk.operands[operand], index, value);
    });
  }

  /// Returns a state's value as rounded to storage.
  template <class Chunk>
  __device__ __forceinline__ static float stored(const Chunk& chunk, int operand, float value) {
    with_type(chunk.dtype(operand), [&](auto narrowed) {
      narrow(value, narrowed);
      value = widen(narrowed);
    });
    return value;
  }

  template <class Chunk>
  __device__ __forceinline__ static float load_source_one(const Chunk& chunk, std::uint32_t index) {
    const unsigned char* master = chunk.operands[kMasterOperand];
    if (chunk.storage->master) return load_element<float>(master, index);
    if (chunk.storage->remainder) {
      const unsigned char* param = chunk.operands[kParamOperand];
      return bits_to_float(join_master({reinterpret_cast<const std::uint16_t*>(param)[index],
                                        reinterpret_cast<const std::uint16_t*>(master)[index]}));
    }
    return load_one<void>(chunk, kParamOperand, index);
  }

  template <class Chunk>
  __device__ __forceinline__ static void store_source_one(const Chunk& chunk, std::uint32_t index,
                                                          float value) {
    unsigned char* param = chunk.operands[kParamOperand];
    unsigned char* master = chunk.operands[kMasterOperand];
    if (chunk.storage->remainder) {
      const SplitMaster halves = split_master(float_bits(value));
      reinterpret_cast<std::uint16_t*>(param)[index] = halves.param;
      reinterpret_cast<std::uint16_t*>(master)[index] = halves.remainder;
      return;
    }
    if (chunk.storage->stochastic) {
      NumberWalk number(chunk.team->numbers, index);
      const std::uint32_t bits = chunk.team->round(float_bits(value), number);
      reinterpret_cast<std::uint16_t*>(param)[index] = static_cast<std::uint16_t>(bits);
      return;
    }
    if (chunk.storage->master) store_element<float>(master, index, value);
    store_one<void>(chunk, kParamOperand, index, value);
  }
};

}  // namespace torchfuse::kernels::cuda
