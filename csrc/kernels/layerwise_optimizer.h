// SPDX-License-Identifier: BSD-3-Clause
// What comes before the update of a layerwise optimizer: norms of whole tensors.
//
// Note [Layerwise optimizers]
// LAMB, LARS and NovoGrad scale the update of a tensor by norms over all its elements. Their step
// has two more phases between prologue and update:
//
//   measure   one pass over the elements: each chunk of kNormChunk elements gives one partial per
//             norm. The functor's `measure` says which values are squared and summed.
//   norms     per tensor: its partials are summed in order, and what the functor tracks of a whole
//             tensor moves (NovoGrad's running norm).
//   update    as for every optimizer; the tensor's coefficients take the norms in by
//             `apply_norms`. Tensors share what is prepared, so it overwrites what it left there.
//
// Of a tensor that is split over processes each holds a part. There the norms phase runs twice:
// first it stops at the sums; when these are summed over the processes, they are the only partial
// of each tensor.
//
// A functor with kStatesInMeasure moves its states before it measures, in `move`, because the
// measured values depend on them; its update only reads them, and no gradient. States are rounded
// to their storage in between: the norm is that of the change which the update will make.
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

/// What one chunk contributes to one norm of its tensor.
struct MeasurePartial {
  NormPartial sums;
  double largest;  ///< magnitude
};

TORCHFUSE_HOST_DEVICE MeasurePartial operator+(const MeasurePartial& a, const MeasurePartial& b) {
  return MeasurePartial{a.sums + b.sums, max(a.largest, b.largest)};
}

template <class Functor>
struct MeasureArgs {
  UpdateArgs<Functor> update;                   ///< its `norms` are what this phase writes
  const std::int64_t* chunk_offsets = nullptr;  ///< first chunk of each tensor: as in L2NormArgs
  /// On the tensors' device: kNumNorms for each of chunk_offsets[count] chunks, all written.
  MeasurePartial* partials = nullptr;
  double* norms = nullptr;  ///< on the tensors' device: kNumNorms for each tensor
  /// Where the norms phase writes the sums of each tensor's partials, kNumNorms for each tensor,
  /// instead of what follows from them; null: it finishes the norms.
  MeasurePartial* sums = nullptr;
  std::int64_t chunk = kNormChunk;  ///< as in L2NormArgs
};

/// Measures every chunk whose first flattened element lies in [begin, end).
template <class Functor>
void fused_measure_cpu(CpuIsa isa, const MeasureArgs<Functor>& args, std::int64_t begin,
                       std::int64_t end);

/// The norms of the tensors [begin, end), once all their chunks are measured; or their sums.
template <class Functor>
void tensor_norms(const MeasureArgs<Functor>& args, std::int64_t begin, std::int64_t end);

/// Enqueues both phases for the whole table; reads the host arrays before it returns.
template <class Functor>
Status fused_measure_cuda(const MeasureArgs<Functor>& args, Stream stream);

/// Enqueues the norms phase alone.
template <class Functor>
Status tensor_norms_cuda(const MeasureArgs<Functor>& args, Stream stream);

/// The norms of one tensor from its sums, and what the functor tracks of it. `tensor_state` points
/// to one T, or is null.
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
