// SPDX-License-Identifier: BSD-3-Clause
#include "reduce.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <type_traits>

namespace pretended_nccl {
namespace {

/// Halves are computed in fp32, all others in their own type.
template <typename T>
using Computed = std::conditional_t<std::is_arithmetic_v<T>, T, float>;

template <typename C>
C combine(ncclRedOp_t operation, C a, C b) {
  switch (operation) {
    case ncclProd:
      return static_cast<C>(a * b);
    case ncclMax:
      return a != a || b < a ? a : b;  // NaN stays
    case ncclMin:
      return a != a || a < b ? a : b;
    default:
      return static_cast<C>(a + b);
  }
}

template <typename T>
void reduce_as(ncclRedOp_t operation, const void* landed, void* out, std::size_t count, int ranks) {
  using C = Computed<T>;
  const T* const values = static_cast<const T*>(landed);
  for (std::size_t i = 0; i < count; ++i) {
    T result{};
    for (int rank = 0; rank < ranks; ++rank) {
      C value = static_cast<C>(values[static_cast<std::size_t>(rank) * count + i]);
      if constexpr (std::is_floating_point_v<C>) {
        if (operation == ncclAvg) value = static_cast<C>(static_cast<T>(value * (C{1} / C(ranks))));
      }
      result = rank == 0 ? static_cast<T>(value)
                         : static_cast<T>(combine(operation, static_cast<C>(result), value));
    }
    if constexpr (std::is_integral_v<T>) {
      if (operation == ncclAvg) result = static_cast<T>(result / static_cast<T>(ranks));
    }
    static_cast<T*>(out)[i] = result;
  }
}

using Reduce = void (*)(ncclRedOp_t, const void*, void*, std::size_t, int);

Reduce reduce_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
      return reduce_as<std::int8_t>;
    case ncclUint8:
      return reduce_as<std::uint8_t>;
    case ncclInt32:
      return reduce_as<std::int32_t>;
    case ncclUint32:
      return reduce_as<std::uint32_t>;
    case ncclInt64:
      return reduce_as<std::int64_t>;
    case ncclUint64:
      return reduce_as<std::uint64_t>;
    case ncclFloat16:
      return reduce_as<c10::Half>;
    case ncclBfloat16:
      return reduce_as<c10::BFloat16>;
    case ncclFloat32:
      return reduce_as<float>;
    case ncclFloat64:
      return reduce_as<double>;
    default:
      return nullptr;
  }
}

}  // namespace

bool can_reduce(ncclDataType_t type, ncclRedOp_t operation) {
  return reduce_of(type) != nullptr && operation >= ncclSum && operation <= ncclAvg;
}

void reduce(ncclDataType_t type, ncclRedOp_t operation, const void* landed, void* out,
            std::size_t count, int ranks) {
  reduce_of(type)(operation, landed, out, count, ranks);
}

}  // namespace pretended_nccl
