// SPDX-License-Identifier: BSD-3-Clause
// Entry points of every elementwise optimizer: K2 of the step, one pass over all tensors.
#pragma once

#include <cstdint>

#include "kernels/common/status.h"
#include "kernels/common/step_scalars.h"
#include "kernels/common/stream.h"
#include "kernels/common/tensor_table.h"
#include "kernels/cpu/isa.h"

namespace torchfuse::kernels {

/// A functor whose update takes norms of whole tensors in. See kernels/layerwise_optimizer.h.
template <class Functor>
concept Layerwise = requires { Functor::kNumNorms; };

/// Whether the states move before the update, which then reads them and no gradient.
template <class Functor>
constexpr bool kStatesInMeasure = false;
template <Layerwise Functor>
constexpr bool kStatesInMeasure<Functor> = Functor::kStatesInMeasure;

/// A functor whose states may begin later than the parameter's steps, and that counts from there.
template <class Functor>
concept CountsFromStart = requires { Functor::kCountsFromStart; };

/// The count that a functor is given.
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
  /// CUDA: walk from the last tensor to the first, and in each from its last chunk to its first.
  /// The results are the same bits.
  bool from_the_end = false;
  /// Layerwise: kNumNorms for each tensor, on the tensors' device.
  const double* norms = nullptr;
};

/// Updates the flattened elements [begin, end) of the table. Ranges may be split anywhere and run
/// on any thread: the result does not depend on it. Does nothing when scalars->skip is set. 16-bit
/// and fp32 storage may be mixed freely; fp64 parameters need fp64 gradients and states, and 16-bit
/// ones alone may have masters, bf16 ones remainders.
template <class Functor>
void fused_update_cpu(CpuIsa isa, const UpdateArgs<Functor>& args, std::int64_t begin,
                      std::int64_t end);

/// Enqueues the update of the whole table; reads the host arrays before it returns.
template <class Functor>
Status fused_update_cuda(const UpdateArgs<Functor>& args, Stream stream);

}  // namespace torchfuse::kernels
