// SPDX-License-Identifier: BSD-3-Clause
// One launch's tensors: one row per parameter, all with one dtype tuple and on one device.
#pragma once

#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/common/ema.h"
#include "kernels/common/stochastic_rounding.h"

namespace torchfuse::kernels {

constexpr int kMaxStates = 3;

/// One parameter with all operands of its update. All operands have `numel` elements in the same
/// memory order. Unused operands are null. The arrays are on the host; their pointers point to the
/// launch's device.
struct TensorRow {
  void* param = nullptr;  ///< read and written; only written if there is an fp32 master
  void* grad = nullptr;   ///< read; written only when gradients are written back
  void* state[kMaxStates] = {};
  void* master = nullptr;  ///< a 16-bit parameter's fp32 master, or a bf16 one's remainder
  void* ema = nullptr;     ///< the parameter's average: see Note [Averages of weights] in ema.h
  float* step = nullptr;   ///< number of the parameter's updates so far
  /// The value of `step` when the states began, for functors that use it; null means 0.
  const float* start = nullptr;
  /// A layerwise optimizer's state per tensor: a double if the tensor is fp64, otherwise a float.
  void* tensor_state = nullptr;
  std::int64_t numel = 0;
  std::int32_t group = 0;    ///< index into the array of per-group hyper-parameters
  std::int64_t index = 0;    ///< the parameter's number, for stochastic rounding
  ElementNumbers numbers{};  ///< its elements' numbers, for stochastic rounding
};

/// Returns whether both rows are equal except for the gradient.
inline bool same_besides_grad(const TensorRow& a, const TensorRow& b) {
  bool same = a.param == b.param && a.master == b.master && a.ema == b.ema && a.step == b.step &&
              a.start == b.start && a.tensor_state == b.tensor_state && a.numel == b.numel &&
              a.group == b.group && a.index == b.index && a.numbers == b.numbers;
  for (int k = 0; k < kMaxStates; ++k) same = same && a.state[k] == b.state[k];
  return same;
}

struct DeviceTable;

/// `offsets` contains count + 1 prefix sums of numel, so that work can be split by elements.
struct TensorTable {
  const TensorRow* rows = nullptr;
  const std::int64_t* offsets = nullptr;
  std::int64_t count = 0;
  DType param = DType::kFloat32;
  DType grad = DType::kFloat32;
  DType state[kMaxStates] = {};  ///< unused states' types are ignored
  bool has_master = false;       ///< fp32 masters
  bool stochastic = false;       ///< bf16 parameters without masters are rounded stochastically
  std::uint64_t seed = 0;        ///< seed of stochastic rounding
  bool has_remainder = false;    ///< see Note [Parameter remainders] in param_remainder.h
  bool has_ema = false;          ///< fp64 for fp64 parameters, else fp32
  EmaParams ema;
  /// The rows on the device, if they are kept there: see Note [Device tables].
  const DeviceTable* device = nullptr;

  std::int64_t total() const { return count == 0 ? 0 : offsets[count]; }
};

/// Returns the row that contains flattened element `position`, 0 <= position < offsets[count].
TORCHFUSE_HOST_DEVICE std::int64_t find_row(const std::int64_t* offsets, std::int64_t count,
                                            std::int64_t position) {
  std::int64_t low = 0;
  std::int64_t high = count;
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    if (offsets[middle] <= position) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace torchfuse::kernels
