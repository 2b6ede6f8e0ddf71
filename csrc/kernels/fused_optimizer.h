// SPDX-License-Identifier: BSD-3-Clause
// Entry points of every elementwise optimizer: K2, the step's single pass over all tensors.
#pragma once

#include <cstdint>

#include "kernels/common/status.h"
#include "kernels/common/step_scalars.h"
#include "kernels/common/stream.h"
#include "kernels/common/tensor_table.h"
#include "kernels/cpu/isa.h"

namespace torchfuse::kernels {

/// A functor whose update uses norms of entire tensors. See kernels/layerwise_optimizer.h.
template <class Functor>
concept Layerwise = requires { Functor::kNumNorms; };

/// Whether an earlier phase, such as a layerwise optimizer's measure, updates the states. The
/// update then reads the states and no gradient.
template <class Functor>
constexpr bool kStatesInMeasure = false;
template <class Functor>
  requires requires { Functor::kStatesInMeasure; }
constexpr bool kStatesInMeasure<Functor> = Functor::kStatesInMeasure;

/// A functor that counts steps from the step in which the states were created, which may come after
/// the parameter's first step.
template <class Functor>
concept CountsFromStart = requires { Functor::kCountsFromStart; };

/// A functor that divides or takes square roots for each element.
template <class Functor>
concept Divides = requires { Functor::kDivides; };

/// Returns the step count that a functor uses.
template <class Functor>
TORCHFUSE_HOST_DEVICE double own_step(float step, [[maybe_unused]] const float* start) {
  if constexpr (CountsFromStart<Functor>) {
    if (start != nullptr) return static_cast<double>(step) - static_cast<double>(*start);
  }
  return static_cast<double>(step);
}

template <class Functor>
struct UpdateArgs {
  TensorTable tensors;
  const typename Functor::Params* groups = nullptr;  ///< host array, indexed by TensorRow::group
  std::int32_t num_groups = 0;
  const StepScalars* scalars = nullptr;  ///< on the tensors' device
  bool write_back_grads = false;         ///< store grad * grad_coef
  /// CUDA only: process tensors from last to first, and each tensor's chunks from last to first.
  /// Results are bit-identical.
  bool from_the_end = false;
  /// Layerwise: kNumNorms norms per tensor, on the tensors' device.
  const double* norms = nullptr;
};

/// Updates the flattened elements [begin, end) of the table. Ranges may be split anywhere and run
/// on any thread without changing the result. Does nothing if scalars->skip is set. 16-bit and fp32
/// storage may be mixed freely. fp64 parameters need fp64 gradients and states. Only 16-bit
/// parameters may have masters, and only bf16 parameters remainders.
template <class Functor>
void fused_update_cpu(CpuIsa isa, const UpdateArgs<Functor>& args, std::int64_t begin,
                      std::int64_t end);

/// Enqueues the update of all tensors in the table. Reads the host arrays before returning.
template <class Functor>
Status fused_update_cuda(const UpdateArgs<Functor>& args, Stream stream);

}  // namespace torchfuse::kernels
