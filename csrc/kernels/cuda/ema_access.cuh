// SPDX-License-Identifier: BSD-3-Clause
// Operand access for an update that also updates a parameter's average. See Note [Averages of
// weights] in common/ema.h.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/common/ema.h"
#include "kernels/common/tensor_table.h"
#include "kernels/cuda/alignment.h"
#include "kernels/cuda/vec.cuh"

namespace torchfuse::kernels::cuda {

/// The policy `Base` with one additional operand: the average, in the compute type. Kernels with
/// averages are separate, so that launches and machine code of other updates do not depend on
/// averages.
template <class Base>
struct EmaAccess : Base {
  using Compute = typename Base::Compute;
  static constexpr int kEmaOperand = Base::kOperands;
  static constexpr int kOperands = Base::kOperands + 1;
  /// A thread has 16 or 32 additional bytes in flight.
  static constexpr int kUpdateBlocksPerSm =
      Base::kUpdateBlocksPerSm > 2 ? Base::kUpdateBlocksPerSm - 1 : 2;

  struct Storage : Base::Storage {
    EmaParams ema;

    Storage() = default;
    explicit Storage(const TensorTable& table) : Base::Storage(table), ema(table.ema) {}
    TORCHFUSE_HOST_DEVICE std::uint32_t element_size(int operand) const {
      return operand == kEmaOperand ? static_cast<std::uint32_t>(sizeof(Compute))
                                    : Base::Storage::element_size(operand);
    }
    TORCHFUSE_HOST_DEVICE bool has_operand(int operand) const {
      return operand == kEmaOperand || Base::Storage::has_operand(operand);
    }
  };
  struct TeamData : Base::TeamData {
    EmaCoefs<Compute> ema;
    __device__ void set(const Storage& storage, const typename Base::RowData& row,
                        std::int64_t begin, float step) {
      Base::TeamData::set(storage, row, begin, step);
      const auto coefs = ema_coefs<Compute>(storage.ema, static_cast<double>(step));
      // Copy field by field: two 8-byte fields are not aligned for a 16-byte access.
      ema.weight = coefs.weight;
      ema.copies = coefs.copies;
    }
  };
};

/// A vector of the average's elements. Does nothing without an average.
template <class Access>
struct EmaVec {
  template <bool kAligned, class Chunk>
  __device__ __forceinline__ void load(const Chunk&, std::uint32_t) {}
  template <class Chunk, class T, std::size_t kGroup>
  __device__ __forceinline__ void move(const Chunk&, int, const T (&)[kGroup]) {}
  template <bool kAligned, class Chunk>
  __device__ __forceinline__ void store(const Chunk&, std::uint32_t) const {}
  template <class Chunk, class T>
  __device__ __forceinline__ static void move_one(const Chunk&, std::uint32_t, T) {}
};

template <class Base>
struct EmaVec<EmaAccess<Base>> {
  using Access = EmaAccess<Base>;
  using Compute = typename Access::Compute;

  template <class Chunk>
  __device__ __forceinline__ static unsigned char* address_of(const Chunk& chunk,
                                                              std::uint32_t index) {
    return chunk.operands[Access::kEmaOperand] + byte_offset<Compute>(index);
  }

  template <bool kAligned, class Chunk>
  __device__ __forceinline__ void load(const Chunk& chunk, std::uint32_t index) {
    const unsigned char* address = address_of(chunk, index);
    load_vec<Keep::kStream>(raw, address, access_width<kAligned>(address));
  }

  /// Updates group `group` of the average from the parameter's new values.
  template <class Chunk, std::size_t kGroup>
  __device__ __forceinline__ void move(const Chunk& chunk, int group,
                                       const Compute (&param)[kGroup]) {
    constexpr int kCount = static_cast<int>(kGroup);
    Compute ema[kCount];
    get_values(raw, kCount * group, ema);
#pragma unroll
    for (int i = 0; i < kCount; ++i) ema[i] = moved_ema(ema[i], param[i], chunk.team->ema);
    set_values(raw, kCount * group, ema);
  }

  template <bool kAligned, class Chunk>
  __device__ __forceinline__ void store(const Chunk& chunk, std::uint32_t index) const {
    unsigned char* address = address_of(chunk, index);
    store_vec<Keep::kStream>(address, raw, access_width<kAligned>(address));
  }

  /// Like move(), for one element.
  template <class Chunk>
  __device__ __forceinline__ static void move_one(const Chunk& chunk, std::uint32_t index,
                                                  Compute param) {
    unsigned char* operand = chunk.operands[Access::kEmaOperand];
    const Compute ema = load_element<Compute>(operand, index);
    store_element<Compute>(operand, index, moved_ema(ema, param, chunk.team->ema));
  }

  RawVec<Compute, Access::kVec> raw;
};

}  // namespace torchfuse::kernels::cuda
