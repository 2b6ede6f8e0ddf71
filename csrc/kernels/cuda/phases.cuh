// SPDX-License-Identifier: BSD-3-Clause
// The phases in which a kernel walks through the elements, and the arguments of its launches.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/common/step_scalars.h"
#include "kernels/cuda/group_table.cuh"
#include "kernels/cuda/launch_table.cuh"
#include "kernels/cuda/thread_sums.cuh"
#include "kernels/layerwise_optimizer.h"

namespace torchfuse::kernels::cuda {

struct Nothing {};

struct RowNorms {
  const double* norms;  ///< of the tensor, kNumNorms of them
};

/// The update phase: parameters, and states unless they moved before, get their new values.
template <class Access_>
struct Update {
  using Access = Access_;
  using Functor = typename Access::Functor;
  static constexpr bool kMeasures = false;
  static constexpr bool kMovesStates = !kStatesInMeasure<Functor>;
  static constexpr bool kReadsGrad = kMovesStates;
  static constexpr bool kReadsStates = true;
  using RowData = std::conditional_t<Layerwise<Functor>, RowNorms, Nothing>;
  using Sums = Nothing;
};

/// The measure phase: sums of what the functor measures, one partial per chunk and norm. See Note
/// [Layerwise optimizers].
template <class Access_>
struct Measure {
  using Access = Access_;
  using Functor = typename Access::Functor;
  static constexpr bool kMeasures = true;
  static constexpr bool kMovesStates = kStatesInMeasure<Functor>;
  static constexpr bool kReadsGrad = true;
  static constexpr bool kReadsStates = kMovesStates;
  struct RowData {
    MeasurePartial* partials;  ///< of the tensor's first chunk
  };
  struct Sums {
    ThreadMeasure<typename Access::Compute> norms[Functor::kNumNorms];
  };
};

/// One parameter in the arguments of a launch.
template <class Phase>
struct Row : Phase::RowData, Phase::Access::RowData {
  void* operands[Phase::Access::kOperands];
  float* step;
  std::int64_t numel;
};

/// What a measure, which peels nothing, has in place of a head where vectors are misaligned.
constexpr std::uint8_t kMisaligned = 1;

/// The arguments of a kernel.
template <class Phase>
struct Launch : Phase::Access::Storage {
  using Params = typename Phase::Functor::Params;
  using Storage = typename Phase::Access::Storage;
  static constexpr std::size_t kStorageBytes = std::is_empty_v<Storage> ? 0 : sizeof(Storage);
  /// Each row also has its group and its head.
  static constexpr int kRows =
      table_capacity(sizeof(Row<Phase>) + 2,
                     kMaxGroups<Params> * sizeof(Params) + 2 * sizeof(void*) + kStorageBytes);

  LaunchTable<Row<Phase>, kRows> table;
  Params groups[kMaxGroups<Params>];
  const StepScalars* scalars;
  bool write_back_grads;
  bool from_the_end;
  std::uint8_t group[kRows];  ///< index into groups
  std::uint8_t head[kRows];   ///< see Note [Peeling]

  void reset() { table.reset(table.chunk); }
  bool full() const { return table.full(); }
  std::int32_t count() const { return table.count; }
  void append(const Row<Phase>& row, std::uint8_t group_place, std::uint8_t row_head) {
    const int place = table.append(row);
    group[place] = group_place;
    head[place] = row_head;
  }
};

}  // namespace torchfuse::kernels::cuda
