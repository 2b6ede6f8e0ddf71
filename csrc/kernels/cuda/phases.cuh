// SPDX-License-Identifier: BSD-3-Clause
// The phases in which a kernel processes the elements, and the arguments of their launches.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/common/step_scalars.h"
#include "kernels/common/tensor_table.h"
#include "kernels/cuda/device_span.cuh"
#include "kernels/cuda/group_table.cuh"
#include "kernels/cuda/launch_table.cuh"
#include "kernels/cuda/thread_sums.cuh"
#include "kernels/layerwise_optimizer.h"

namespace torchfuse::kernels::cuda {

struct Nothing {};

struct RowNorms {
  const double* norms;  ///< the tensor's kNumNorms norms
};

/// The update phase writes new parameters, and new states unless the measure phase has. A launch
/// has `kBytes` of arguments: see Note [Short lists].
template <class Access_, std::size_t kBytes = kMaxArgumentBytes>
struct Update {
  static constexpr std::size_t kArgumentBytes = kBytes;
  using Access = Access_;
  using Functor = typename Access::Functor;
  static constexpr bool kMeasures = false;
  static constexpr bool kMovesStates = !kStatesInMeasure<Functor>;
  static constexpr bool kReadsGrad = kMovesStates;
  static constexpr bool kReadsStates = true;
  using RowData = std::conditional_t<Layerwise<Functor>, RowNorms, Nothing>;
  using Sums = Nothing;
};

/// The measure phase sums the functor's measured values, with one partial per chunk and norm. See
/// Note [Layerwise optimizers].
template <class Access_>
struct Measure {
  static constexpr std::size_t kArgumentBytes = kMaxArgumentBytes;
  using Access = Access_;
  using Functor = typename Access::Functor;
  static constexpr bool kMeasures = true;
  static constexpr bool kMovesStates = kStatesInMeasure<Functor>;
  static constexpr bool kReadsGrad = true;
  static constexpr bool kReadsStates = kMovesStates;
  struct RowData {
    MeasurePartial* partials;  ///< partials of the tensor's first chunk
  };
  struct Sums {
    ThreadMeasure<typename Access::Compute> norms[Functor::kNumNorms];
  };
};

/// The step from which a functor counts, if the functor uses it.
template <class Functor>
struct StartOfRow {
  static constexpr const float* start = nullptr;
};
template <CountsFromStart Functor>
struct StartOfRow<Functor> {
  const float* start;
};

/// One parameter in a launch's arguments.
template <class Phase>
struct Row : Phase::RowData, Phase::Access::RowData, StartOfRow<typename Phase::Functor> {
  void* operands[Phase::Access::kOperands];
  float* step;
  std::int64_t numel;
};

/// Replaces the head's length in a measure, which peels nothing, if vectors are misaligned.
constexpr std::uint8_t kMisaligned = 1;

template <class Phase>
TORCHFUSE_HOST_DEVICE Row<Phase> row_of(const TensorRow& tensor) {
  using Access = typename Phase::Access;
  constexpr int kMasterOperand = Access::kStateOperand + Access::kStates;
  Row<Phase> row;
  row.operands[Access::kParamOperand] = tensor.param;
  row.operands[Access::kGradOperand] = tensor.grad;
  for (int k = 0; k < Access::kStates; ++k) {
    row.operands[Access::kStateOperand + k] = tensor.state[k];
  }
  if constexpr (Access::kOperands > kMasterOperand) row.operands[kMasterOperand] = tensor.master;
  if constexpr (requires { Access::kEmaOperand; }) row.operands[Access::kEmaOperand] = tensor.ema;
  row.step = tensor.step;
  if constexpr (CountsFromStart<typename Phase::Functor>) row.start = tensor.start;
  row.numel = tensor.numel;
  row.set(tensor);
  return row;
}

/// Whether a kernel's launches may be spans of a device table: updates of aligned operands that
/// need no other data.
template <class Phase, bool kAligned>
constexpr bool kTakesSpans = kAligned && !Phase::kMeasures && !Layerwise<typename Phase::Functor> &&
                             Phase::kArgumentBytes == kMaxArgumentBytes;

/// A kernel's arguments.
template <class Phase>
struct Launch : Phase::Access::Storage {
  using Params = typename Phase::Functor::Params;
  using Storage = typename Phase::Access::Storage;
  static constexpr std::size_t kStorageBytes = std::is_empty_v<Storage> ? 0 : sizeof(Storage);
  static constexpr int kGroups = kMaxGroups<Params, Phase::kArgumentBytes>;
  /// Each row also has a group and a head.
  static constexpr int kRows = table_capacity(
      sizeof(Row<Phase>) + 2, kGroups * sizeof(Params) + 2 * sizeof(void*) + kStorageBytes,
      Phase::kArgumentBytes);

  using Table = LaunchTable<Row<Phase>, kRows>;
  union {
    Table table;
    DeviceSpan<sizeof(Table)> span;
  };
  bool is_span;       ///< whether `span` is used
  bool from_the_end;  ///< see row_share(); false in a span
  bool write_back_grads;
  Params groups[kGroups];
  const StepScalars* scalars;
  std::uint8_t group[kRows];  ///< index into groups; in a span a row's group is
  std::uint8_t head[kRows];   ///< see Note [Peeling]; in a span 0

  void reset() { table.reset(table.chunk); }
  bool full() const { return table.full(); }
  std::int32_t count() const { return table.count; }
  void append(const Row<Phase>& row, std::uint8_t group_place, std::uint8_t row_head) {
    const int place = table.append(row);
    group[place] = group_place;
    head[place] = row_head;
  }
};

/// Whether a launch reads an operand of rows with the hyper-parameters `params`. A parameter with a
/// master is only written.
template <class Phase>
TORCHFUSE_HOST_DEVICE bool reads_operand(const Launch<Phase>& launch,
                                         const typename Phase::Functor::Params& params,
                                         int operand) {
  using Access = typename Phase::Access;
  const int state = operand - Access::kStateOperand;
  if (state >= 0 && state < Access::kStates) {
    return Phase::kReadsStates && Phase::Functor::uses_state(params, state);
  }
  if (operand == Access::kParamOperand) return !launch.has_master();
  if (operand == Access::kGradOperand) return Phase::kReadsGrad;
  return launch.has_operand(operand);
}

template <class Phase, bool kAligned>
__device__ __forceinline__ RowShare share_of(const Launch<Phase>& launch) {
  if constexpr (kTakesSpans<Phase, kAligned>) {
    RowShare share = row_share(EitherRows(launch), launch.from_the_end);
    const bool left_out =
        launch.is_span && share.row >= 0 && launch.span.grads[share.row] == nullptr;
    if (left_out) share.row = -1;
    return share;
  } else {
    return row_share(launch.table, launch.from_the_end);
  }
}

/// A launch's data about one row, from the table or from the span.
template <class Phase>
struct FoundRow {
  Row<Phase> row;
  std::int32_t group;  ///< index into the launch's groups
  std::uint32_t head;
};

template <class Phase, bool kAligned>
__device__ __forceinline__ FoundRow<Phase> find(const Launch<Phase>& launch, int row) {
  if constexpr (kTakesSpans<Phase, kAligned>) {
    if (launch.is_span) {
      const TensorRow& tensor = launch.span.row(row).tensor;
      FoundRow<Phase> found{row_of<Phase>(tensor), tensor.group, 0};
      found.row.operands[Phase::Access::kGradOperand] = launch.span.grads[row];
      return found;
    }
  }
  return {launch.table.rows[row], launch.group[row], launch.head[row]};
}

}  // namespace torchfuse::kernels::cuda
