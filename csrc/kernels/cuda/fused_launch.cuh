// SPDX-License-Identifier: BSD-3-Clause
// Fills and enqueues launches of the update and measure kernels, for any functor and dtype tuple.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "kernels/common/tensor_table.h"
#include "kernels/cuda/alignment.h"
#include "kernels/cuda/ema_access.cuh"
#include "kernels/cuda/fused_kernels.cuh"
#include "kernels/cuda/group_table.cuh"
#include "kernels/cuda/launch_table.cuh"
#include "kernels/cuda/looked_up_access.cuh"
#include "kernels/cuda/phases.cuh"
#include "kernels/cuda/typed_access.cuh"
#include "kernels/cuda/typed_tuples.h"
#include "kernels/fused_optimizer.h"
#include "kernels/layerwise_optimizer.h"

namespace torchfuse::kernels::cuda {

/// The access policies whose kernels serve a dtype tuple. Tuples share a kernel if they differ only
/// in operands that the phase does not use: gradients in an update that reads none, states in a
/// measure that updates none.
template <class Access>
struct Needed {
  using ForUpdate = Access;
  using ForMeasure = Access;
};
template <class Functor, class Param, class Grad, class State, bool kMaster>
  requires(sizeof(Param) == 2 && (Layerwise<Functor> || kStatesInMeasure<Functor>))
struct Needed<TypedAccess<Functor, Param, Grad, State, kMaster>> {
  static constexpr bool kEarly = kStatesInMeasure<Functor>;
  using ForUpdate =
      TypedAccess<Functor, Param, std::conditional_t<kEarly, Param, Grad>, State, kMaster>;
  using ForMeasure = TypedAccess<Functor, Param, Grad,
                                 std::conditional_t<kEarly || kMaster, State, Param>, kMaster>;
};

/// An update with averages uses the policy of the update without averages, extended by the average.
template <class Access>
struct Needed<EmaAccess<Access>> {
  using ForUpdate = EmaAccess<typename Needed<Access>::ForUpdate>;
};

/// Sets the arguments that all rows of a table share. `chunk` is in elements.
template <class Phase>
void begin_launch(const UpdateArgs<typename Phase::Functor>& args, std::uint32_t chunk,
                  Launch<Phase>& launch) {
  using Storage = typename Phase::Access::Storage;
  static_cast<Storage&>(launch) = Storage(args.tensors);
  launch.scalars = args.scalars;
  launch.write_back_grads = args.write_back_grads;
  launch.is_span = false;
  launch.from_the_end = args.from_the_end;
  launch.table.chunk = chunk;
}

/// Returns how a phase's accesses to a row's used operands are aligned.
template <class Phase>
Peeling peeling_of(const Launch<Phase>& launch, const Row<Phase>& row,
                   const typename Phase::Functor::Params& params) {
  using Access = typename Phase::Access;
  OperandAccess accesses[Access::kOperands];
  int count = 0;
  for (int o = 0; o < Access::kOperands; ++o) {
    const bool write_only = !Phase::kMeasures && o == Access::kParamOperand && launch.has_master();
    if (!write_only && !reads_operand(launch, params, o)) continue;
    const bool read_only = o == Access::kGradOperand && !launch.write_back_grads;
    accesses[count++] = {reinterpret_cast<std::uintptr_t>(row.operands[o]), launch.element_size(o),
                         read_only || write_only ? 1u : 2u};
  }
  return best_peeling(accesses, count, Access::kVec);
}

/// The rows that an update still has to enqueue.
struct Rest {
  bool of_spans = false;  ///< excludes rows for which all_aligned() holds
  bool misaligned = false;
};

/// Enqueues the aligned rows that are kept on the device. See Note [Device tables].
template <class Access>
Status enqueue_spans(const UpdateArgs<typename Access::Functor>& args, std::uint32_t chunk,
                     Stream stream) {
  const TensorTable& tensors = args.tensors;
  Launch<Update<Access>> launch{};
  begin_launch(args, chunk, launch);
  launch.is_span = true;
  launch.from_the_end = false;
  std::copy_n(args.groups, args.num_groups, launch.groups);
  const auto grad_of = [&](std::int64_t i) {
    return all_aligned(tensors.rows[i]) ? tensors.rows[i].grad : nullptr;
  };
  const std::int32_t spans = (tensors.device->count + launch.span.kRows - 1) / launch.span.kRows;
  for (std::int32_t i = 0; i < spans; ++i) {
    const std::int32_t begin = launch.span.kRows * (args.from_the_end ? spans - 1 - i : i);
    if (launch.span.fill(*tensors.device, begin, args.from_the_end, grad_of) == 0) continue;
    const Status status = kernels::cuda::launch(
        fused_update_kernel<Access, true, kMaxArgumentBytes>, launch, launch.span.blocks, kThreads,
        stream, "launch of fused_update_kernel");
    if (!status.ok()) return status;
  }
  return Status{};
}

/// Enqueues the aligned rows, or the misaligned rows, by value.
template <class Phase, bool kAligned>
Status enqueue_rows(const UpdateArgs<typename Phase::Functor>& args, std::uint32_t chunk,
                    Stream stream, Rest& rest) {
  using Functor = typename Phase::Functor;
  static_assert(sizeof(Launch<Phase>) <= Phase::kArgumentBytes);
  Launch<Phase> launch{};
  begin_launch(args, chunk, launch);
  LaunchFiller filler(launch, args.groups, [&](const Launch<Phase>& full) {
    return kernels::cuda::launch(
        fused_update_kernel<typename Phase::Access, kAligned, Phase::kArgumentBytes>, full,
        full.table.blocks(), kThreads, stream, "launch of fused_update_kernel");
  });
  const Status status = for_each_row(
      args.tensors,
      [&](std::int64_t i) {
        const TensorRow& tensor = args.tensors.rows[i];
        if (rest.of_spans && all_aligned(tensor)) return Status{};
        Row<Phase> row = row_of<Phase>(tensor);
        if constexpr (Layerwise<Functor>) row.norms = args.norms + i * Functor::kNumNorms;
        const Peeling peeling = peeling_of(launch, row, args.groups[tensor.group]);
        if (peeling.aligned == kAligned) return filler.add(row, tensor.group, peeling.head);
        rest.misaligned = true;
        return Status{};
      },
      args.from_the_end);
  return status.ok() ? filler.flush() : status;
}

/// Whether updates of short lists have a kernel of their own: see Note [Short lists]. Gradients
/// have the parameter's type. 16-bit parameters have fp32 masters, or states of their type. Muon's
/// passes, which are no optimizers by name, have few operands of these types.
template <class Access>
constexpr bool kHasShortKernel = false;
template <class Functor, class Param, class Grad, class State, bool kMaster>
constexpr bool kHasShortKernel<TypedAccess<Functor, Param, Grad, State, kMaster>> =
    requires { Functor::kName; } && !Layerwise<Functor> && std::is_same_v<Param, Grad> &&
    sizeof(Param) <= sizeof(float) && kMaster == (sizeof(Param) < sizeof(State));

/// Enqueues the aligned rows by value.
template <class Access>
Status enqueue_aligned(const UpdateArgs<typename Access::Functor>& args, std::uint32_t chunk,
                       Stream stream, Rest& rest) {
  if constexpr (kHasShortKernel<Access>) {
    using Phase = Update<Access, kShortArgumentBytes>;
    static_assert(Launch<Phase>::kRows >= 48);
    if (!rest.of_spans && args.tensors.count <= Launch<Phase>::kRows &&
        args.num_groups <= Launch<Phase>::kGroups) {
      return enqueue_rows<Phase, true>(args, chunk, stream, rest);
    }
  }
  return enqueue_rows<Update<Access>, true>(args, chunk, stream, rest);
}

template <class Tuple>
Status enqueue_updates(const UpdateArgs<typename Tuple::Functor>& args, Stream stream) {
  using Access = typename Needed<Tuple>::ForUpdate;
  using Phase = Update<Access>;
  const std::uint32_t chunk = choose_chunk(args.tensors.total(), kThreads * Access::kVec);
  Rest rest;
  if constexpr (kTakesSpans<Phase, true>) {
    if (args.tensors.device != nullptr && args.num_groups <= Launch<Phase>::kGroups) {
      const Status status = enqueue_spans<Access>(args, chunk, stream);
      if (!status.ok()) return status;
      rest.of_spans = true;
    }
  }
  const Status status = enqueue_aligned<Access>(args, chunk, stream, rest);
  if (!status.ok() || !rest.misaligned) return status;
  return enqueue_rows<Phase, false>(args, chunk, stream, rest);
}

template <class Tuple>
Status enqueue_measures(const MeasureArgs<typename Tuple::Functor>& args, Stream stream) {
  using Access = typename Needed<Tuple>::ForMeasure;
  using Phase = Measure<Access>;
  const auto& update = args.update;
  Launch<Phase> launch{};
  begin_launch(update, static_cast<std::uint32_t>(args.chunk), launch);
  LaunchFiller filler(launch, update.groups, [&](const Launch<Phase>& full) {
    return kernels::cuda::launch(fused_measure_kernel<Access>, full, full.table.blocks(), kThreads,
                                 stream, "launch of fused_measure_kernel");
  });
  const Status status = for_each_row(
      update.tensors,
      [&](std::int64_t i) {
        const TensorRow& tensor = update.tensors.rows[i];
        Row<Phase> row = row_of<Phase>(tensor);
        row.partials = args.partials + args.chunk_offsets[i] * Access::Functor::kNumNorms;
        const Peeling peeling = peeling_of(launch, row, update.groups[tensor.group]);
        const bool aligned = peeling.head == 0 && peeling.aligned;
        return filler.add(row, tensor.group, aligned ? 0 : kMisaligned);
      },
      update.from_the_end);
  return status.ok() ? filler.flush() : status;
}

// --- The choice of the kernel --------------------------------------------------------------------

inline Status unknown_tuple() {
  return Status{cudaErrorInvalidValue,
                "fused update (the update kernels are not built for this tuple of parameter, "
                "gradient, state and master dtypes)"};
}

/// Calls run(TypedAccess<...>{}) for the dtype tuple of a table that has a separate kernel and
/// whose parameters have the 16-bit type `Param`.
template <class Functor, class Param, class Run>
Status dispatch_16_bit(const TensorTable& table, Run run) {
  const auto with_grad = [&](auto grad) {
    using Grad = decltype(grad);
    if (table.has_master) return run(TypedAccess<Functor, Param, Grad, float, true>{});
    if (table.state[0] == DType::kFloat32) {
      return run(TypedAccess<Functor, Param, Grad, float, false>{});
    }
    return run(TypedAccess<Functor, Param, Grad, Param, false>{});
  };
  return table.grad == DType::kFloat32 ? with_grad(float{}) : with_grad(Param{});
}

/// Calls run(TypedAccess<...>{}) for the table's dtype tuple, run_16_bit(Param{}) for 16-bit
/// parameters, or run(LookedUpAccess<Functor>{}) for a tuple without a separate kernel. Must agree
/// with has_typed_kernel.
template <class Functor, class Run, class Run16Bit>
Status dispatch_access(const TensorTable& table, Run run, Run16Bit run_16_bit) {
  if (!has_typed_kernel(table, Functor::kNumStates)) {
    if (has_looked_up_kernel(table, Functor::kNumStates)) return run(LookedUpAccess<Functor>{});
    return unknown_tuple();
  }
  switch (table.param) {
    case DType::kFloat64:
      return run(TypedAccess<Functor, double, double, double, false>{});
    case DType::kFloat16:
      return run_16_bit(Half{});
    case DType::kBFloat16:
      return run_16_bit(BFloat16{});
    case DType::kFloat32:
      break;
  }
  if (table.grad == DType::kFloat16) return run(TypedAccess<Functor, float, Half, float, false>{});
  if (table.grad == DType::kBFloat16) {
    return run(TypedAccess<Functor, float, BFloat16, float, false>{});
  }
  return run(TypedAccess<Functor, float, float, float, false>{});
}

template <class Functor, class Param>
Status update_16_bit(const UpdateArgs<Functor>& args, Stream stream) {
  return dispatch_16_bit<Functor, Param>(
      args.tensors, [&](auto access) { return enqueue_updates<decltype(access)>(args, stream); });
}

/// Runs an update with averages. Must agree with has_typed_ema_kernel.
template <class Functor>
Status update_with_ema(const UpdateArgs<Functor>& args, Stream stream) {
  const TensorTable& table = args.tensors;
  const auto run = [&](auto access) {
    return enqueue_updates<EmaAccess<decltype(access)>>(args, stream);
  };
  if (!has_typed_ema_kernel(table, Functor::kNumStates)) {
    if (has_looked_up_kernel(table, Functor::kNumStates)) return run(LookedUpAccess<Functor>{});
    return unknown_tuple();
  }
  switch (table.param) {
    case DType::kFloat64:
      return run(TypedAccess<Functor, double, double, double, false>{});
    case DType::kFloat16:
      return run(TypedAccess<Functor, Half, Half, float, true>{});
    case DType::kBFloat16:
      return run(TypedAccess<Functor, BFloat16, BFloat16, float, true>{});
    case DType::kFloat32:
      break;
  }
  return run(TypedAccess<Functor, float, float, float, false>{});
}

template <class Functor, class Param>
Status measure_16_bit(const MeasureArgs<Functor>& args, Stream stream) {
  return dispatch_16_bit<Functor, Param>(args.update.tensors, [&](auto access) {
    return enqueue_measures<decltype(access)>(args, stream);
  });
}

}  // namespace torchfuse::kernels::cuda

namespace torchfuse::kernels {

template <class Functor>
Status fused_update_cuda(const UpdateArgs<Functor>& args, Stream stream) {
  if (args.tensors.has_ema) return cuda::update_with_ema<Functor>(args, stream);
  return cuda::dispatch_access<Functor>(
      args.tensors,
      [&](auto access) { return cuda::enqueue_updates<decltype(access)>(args, stream); },
      [&](auto param) { return cuda::update_16_bit<Functor, decltype(param)>(args, stream); });
}

template <class Functor>
Status fused_measure_cuda(const MeasureArgs<Functor>& args, Stream stream) {
  const Status status = cuda::dispatch_access<Functor>(
      args.update.tensors,
      [&](auto access) { return cuda::enqueue_measures<decltype(access)>(args, stream); },
      [&](auto param) { return cuda::measure_16_bit<Functor, decltype(param)>(args, stream); });
  return status.ok() ? tensor_norms_cuda(args, stream) : status;
}

}  // namespace torchfuse::kernels
