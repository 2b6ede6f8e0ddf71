// SPDX-License-Identifier: BSD-3-Clause
// The phases before a layerwise optimizer's update: norms of entire tensors.
//
// Note [Layerwise optimizers]
// LAMB, LARS and NovoGrad scale a tensor's update by norms over all elements. Each step has two
// additional phases between prologue and update:
//
//   measure   one pass over the elements: each chunk of kNormChunk elements gives one partial per
//             norm. The functor's `measure` says which values are squared and summed.
//   norms     per tensor: the partials are summed in order, and the functor's state per tensor is
//             updated (NovoGrad's running norm).
//   update    as for every optimizer, after `apply_norms` has put the norms into the coefficients.
//             Tensors share prepared coefficients, so `apply_norms` overwrites its former results.
//
// If a tensor is sharded over processes, each process has only a shard. The norms phase then runs
// twice. The first run only writes the sums. After a reduction over the processes, each tensor's
// sums are the tensor's only partial in the second run.
//
// A functor with kStatesInMeasure updates the states in `move` before measuring, because the
// measured values depend on the states. The update then only reads the states, and no gradient. The
// new states are rounded to storage before the measurement, so that the norm describes the change
// which the update will make.
#pragma once

#include <cstdint>

#include "kernels/common/math.h"
#include "kernels/common/status.h"
#include "kernels/common/step_scalars.h"
#include "kernels/common/stream.h"
#include "kernels/cpu/isa.h"
#include "kernels/functors/l2_norm.h"
#include "kernels/fused_optimizer.h"

namespace torchfuse::kernels {

/// One chunk's contribution to one of the tensor's norms.
struct MeasurePartial {
  NormPartial sums;
  double largest;  ///< largest magnitude
};

TORCHFUSE_HOST_DEVICE MeasurePartial operator+(const MeasurePartial& a, const MeasurePartial& b) {
  return MeasurePartial{a.sums + b.sums, max(a.largest, b.largest)};
}

template <class Functor>
struct MeasureArgs {
  UpdateArgs<Functor> update;                   ///< `update.norms` are this phase's result
  const std::int64_t* chunk_offsets = nullptr;  ///< each tensor's first chunk, as in L2NormArgs
  /// On the tensors' device: kNumNorms partials for each of chunk_offsets[count] chunks, all
  /// written.
  MeasurePartial* partials = nullptr;
  double* norms = nullptr;  ///< on the tensors' device: kNumNorms per tensor
  /// If not null, the norms phase only writes each tensor's sums of partials here, kNumNorms per
  /// tensor, and does not finish the norms.
  MeasurePartial* sums = nullptr;
  std::int64_t chunk = kNormChunk;  ///< as in L2NormArgs
};

/// Measures every chunk whose first flattened element is in [begin, end).
template <class Functor>
void fused_measure_cpu(CpuIsa isa, const MeasureArgs<Functor>& args, std::int64_t begin,
                       std::int64_t end);

/// Computes the norms of tensors [begin, end), or the tensors' sums, after all chunks have been
/// measured.
template <class Functor>
void tensor_norms(const MeasureArgs<Functor>& args, std::int64_t begin, std::int64_t end);

/// Enqueues both phases for all tensors in the table. Reads the host arrays before returning.
template <class Functor>
Status fused_measure_cuda(const MeasureArgs<Functor>& args, Stream stream);

/// Enqueues only the norms phase.
template <class Functor>
Status tensor_norms_cuda(const MeasureArgs<Functor>& args, Stream stream);

/// Computes a tensor's norms from the sums, and updates the state that the functor tracks per
/// tensor. `tensor_state` points to a T, or is null.
template <class Functor, class T>
TORCHFUSE_HOST_DEVICE void finish_norms(const typename Functor::Params& params, double step,
                                        const MeasurePartial* sums, void* tensor_state,
                                        double* norms) {
  for (int n = 0; n < Functor::kNumNorms; ++n) norms[n] = norm_of(sums[n].sums);
  if constexpr (Functor::kTracksNorm) {
    T* tracked = static_cast<T*>(tensor_state);
    norms[0] =
        Functor::track(params, step, norms[0], sums[0].largest, static_cast<double>(*tracked));
    *tracked = round_to<T>(norms[0]);
  }
}

}  // namespace torchfuse::kernels
