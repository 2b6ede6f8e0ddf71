// SPDX-License-Identifier: BSD-3-Clause
// The tensors of one launch: one row per parameter, all of one dtype tuple and on one device.
#pragma once

#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/common/ema.h"
#include "kernels/common/stochastic_rounding.h"

namespace torchfuse::kernels {

constexpr int kMaxStates = 3;

/// One parameter with everything that its update touches. All operands have `numel` elements in the
/// same memory order. Unused operands are null. The arrays live on the host; pointers inside point
/// to the launch's device.
struct TensorRow {
  void* param = nullptr;  ///< read and written; only written where there is an fp32 master
  void* grad = nullptr;   ///< read; written only when gradients are written back
  void* state[kMaxStates] = {};
  void* master = nullptr;  ///< fp32 master of a 16-bit parameter, or remainder of a bf16 one
  void* ema = nullptr;     ///< average of the parameter: see Note [Averages of weights] in ema.h
  float* step = nullptr;   ///< number of updates that this parameter has received
  /// `step` when the states began, for functors that ask; null: 0.
  const float* start = nullptr;
  /// What a layerwise optimizer tracks of the whole tensor: one double if it is fp64, else a float.
  void* tensor_state = nullptr;
  std::int64_t numel = 0;
  std::int32_t group = 0;    ///< index into the array of per-group hyper-parameters
  std::int64_t index = 0;    ///< number of the parameter, for the random bits of its rounding
  ElementNumbers numbers{};  ///< of its elements, for the same
};

/// Whether the rows say the same of everything but the gradient.
inline bool same_besides_grad(const TensorRow& a, const TensorRow& b) {
  bool same = a.param == b.param && a.master == b.master && a.ema == b.ema && a.step == b.step &&
              a.start == b.start && a.tensor_state == b.tensor_state && a.numel == b.numel &&
              a.group == b.group && a.index == b.index && a.numbers == b.numbers;
  for (int k = 0; k < kMaxStates; ++k) same = same && a.state[k] == b.state[k];
  return same;
}

struct DeviceTable;

/// `offsets` are the prefix sums of numel, count + 1 of them, so that work can be split by
/// elements.
struct TensorTable {
  const TensorRow* rows = nullptr;
  const std::int64_t* offsets = nullptr;
  std::int64_t count = 0;
  DType param = DType::kFloat32;
  DType grad = DType::kFloat32;
  DType state[kMaxStates] = {};  ///< those of unused states do not matter
  bool has_master = false;       ///< in fp32
  bool stochastic = false;       ///< bf16 parameters without masters are rounded at random
  std::uint64_t seed = 0;        ///< of those random bits
  bool has_remainder = false;    ///< see Note [Parameter remainders] in param_remainder.h
  bool has_ema = false;          ///< in fp64 for fp64 parameters, else in fp32
  EmaParams ema;
  /// The same rows on the device, if they are kept there: see Note [Device tables].
  const DeviceTable* device = nullptr;

  std::int64_t total() const { return count == 0 ? 0 : offsets[count]; }
};

/// The row that holds flattened element `position`, 0 <= position < offsets[count].
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
