// SPDX-License-Identifier: BSD-3-Clause
// The compile-time side of an update kernel: its dtype tuple, the layout of its streams, its
// arguments, and the choice of the tuple at run time.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "kernels/common/dtype.h"
#include "kernels/common/float16.h"
#include "kernels/common/step_scalars.h"
#include "kernels/common/tensor_table.h"
#include "kernels/cuda/alignment.h"
#include "kernels/cuda/group_slots.cuh"
#include "kernels/cuda/launch_table.cuh"
#include "kernels/cuda/mixed_types.cuh"
#include "kernels/cuda/supported_dtypes.h"
#include "kernels/cuda/update_row.cuh"
#include "kernels/fused_optimizer.h"

namespace torchfuse::kernels::cuda {

template <class Functor_, class Param_, class Grad_, class State_, bool kMaster_>
struct UpdateTypes {
  using Functor = Functor_;
  using Param = Param_;
  using Grad = Grad_;
  using State = State_;
  using Params = typename Functor::Params;
  using Compute = std::conditional_t<std::is_same_v<Param, double>, double, float>;
  using Coefs = typename Functor::template Coefs<Compute>;
  static constexpr bool kMaster = kMaster_;
  using Source = std::conditional_t<kMaster, float, Param>;  ///< what the old value is read from

  /// The states moved in an earlier phase: they are only read, and no gradient is.
  static constexpr bool kStatesMoved = kStatesInMeasure<Functor>;

  static constexpr int kStates = Functor::kNumStates;
  static constexpr int kParamStream = 0;
  static constexpr int kGradStream = 1;
  static constexpr int kStateStream = 2;  ///< the first of kStates
  static constexpr int kSourceStream = kMaster ? kStateStream + kStates : kParamStream;
  static constexpr int kStreams = kStateStream + kStates + (kMaster ? 1 : 0);

  TORCHFUSE_HOST_DEVICE static constexpr std::uint32_t element_size(int stream) {
    if (stream == kParamStream) return sizeof(Param);
    if (stream == kGradStream) return sizeof(Grad);
    if (stream == kSourceStream) return sizeof(Source);
    return sizeof(State);
  }

  /// Elements per vector: 16 bytes of the narrowest stream.
  static constexpr int kVec =
      kVectorBytes /
      (sizeof(Param) == 2 || sizeof(Grad) == 2 || sizeof(State) == 2 ? 2 : sizeof(Param));

  /// Bytes that a thread has in flight, all states in use.
  static constexpr int kLoadBytes =
      kVec * static_cast<int>(sizeof(Source) + sizeof(Grad) + kStates * sizeof(State));

  using Row = UpdateRow<kStreams, Layerwise<Functor>>;

  /// What a launch has to say about its streams besides their addresses: nothing, it is all known.
  struct Storage {
    Storage() = default;
    explicit Storage(const TensorTable&) {}
    TORCHFUSE_HOST_DEVICE static constexpr std::uint32_t element_size(int stream) {
      return UpdateTypes::element_size(stream);
    }
    static constexpr bool has_master() { return kMaster; }
    static constexpr bool has_stream(int) { return true; }
  };

  /// Resident blocks per multiprocessor that registers are budgeted for: as many as go without
  /// spills on every architecture. 40 to 96 KB of loads are in flight.
  static constexpr int kBlocksPerSm = sizeof(Compute) == 8 || kLoadBytes >= 128 ? 2
                                      : kVec == 4                               ? 4
                                                                                : 3;
};

/// The addresses of a tensor's streams, in the order of `Types`.
template <class Types>
void set_streams(const TensorRow& row, void* (&streams)[Types::kStreams]) {
  constexpr int kMasterStream = Types::kStateStream + Types::kStates;
  streams[Types::kParamStream] = row.param;
  streams[Types::kGradStream] = row.grad;
  for (int k = 0; k < Types::kStates; ++k) streams[Types::kStateStream + k] = row.state[k];
  if constexpr (Types::kStreams > kMasterStream) streams[kMasterStream] = row.master;
}

/// What a launch's Storage takes of its arguments.
template <class Types>
constexpr std::size_t storage_bytes =
    std::is_empty_v<typename Types::Storage> ? 0 : sizeof(typename Types::Storage);

template <class Types>
struct UpdateLaunch : Types::Storage {
  using Row = typename Types::Row;
  using Params = typename Types::Params;
  /// Each row also has its group and its head.
  static constexpr int kRows =
      table_capacity(sizeof(Row) + 2, kMaxGroups<Params> * sizeof(Params) + 2 * sizeof(void*) +
                                          storage_bytes<Types>);

  LaunchTable<Row, kRows> table;
  Params groups[kMaxGroups<Params>];
  const StepScalars* scalars;
  bool write_back_grads;
  std::uint8_t group[kRows];  ///< index into groups
  std::uint8_t head[kRows];   ///< see Note [Peeling]
};

/// Calls run(UpdateTypes<...>{}) for the tuple of a table whose parameters are in the 16-bit
/// `Param` and that has a kernel of its own.
template <class Functor, class Param, class Run>
Status dispatch_half_width(const TensorTable& table, Run run) {
  const auto with_grad = [&](auto grad) {
    using Grad = decltype(grad);
    if (table.has_master) return run(UpdateTypes<Functor, Param, Grad, float, true>{});
    if (table.state[0] == DType::kFloat32) {
      return run(UpdateTypes<Functor, Param, Grad, float, false>{});
    }
    return run(UpdateTypes<Functor, Param, Grad, Param, false>{});
  };
  return table.grad == DType::kFloat32 ? with_grad(float{}) : with_grad(Param{});
}

/// Calls run(UpdateTypes<...>{}) for the tuple of the table, run_half_width(Param{}) if parameters
/// are in 16 bits, or run(MixedTypes<Functor>{}) if the tuple has no kernel of its own. Must agree
/// with has_own_kernel. See Note [One object per 16-bit type].
template <class Functor, class Run, class RunHalfWidth>
Status dispatch_update(const TensorTable& table, Run run, RunHalfWidth run_half_width) {
  if (!has_own_kernel(table, Functor::kNumStates)) {
    if (has_mixed_kernel(table, Functor::kNumStates)) return run(MixedTypes<Functor>{});
    return Status{cudaErrorInvalidValue,
                  "fused update (the update kernels are not built for this tuple of parameter, "
                  "gradient, state and master dtypes)"};
  }
  switch (table.param) {
    case DType::kFloat64:
      return run(UpdateTypes<Functor, double, double, double, false>{});
    case DType::kFloat16:
      return run_half_width(Half{});
    case DType::kBFloat16:
      return run_half_width(BFloat16{});
    case DType::kFloat32:
      break;
  }
  if (table.grad == DType::kFloat16) {
    return run(UpdateTypes<Functor, float, Half, float, false>{});
  }
  if (table.grad == DType::kBFloat16) {
    return run(UpdateTypes<Functor, float, BFloat16, float, false>{});
  }
  return run(UpdateTypes<Functor, float, float, float, false>{});
}

// Note [One object per 16-bit type]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A functor's kernels, some thirty for each architecture, would take a compiler most of a minute in
// one file. Those for parameters in fp16 and in bf16 are therefore explicit instances in files of
// their own (instantiate/*_half_width_cuda.cu.in), which the file of the others declares extern:
// all three compile side by side.

}  // namespace torchfuse::kernels::cuda
