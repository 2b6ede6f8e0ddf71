// SPDX-License-Identifier: BSD-3-Clause
// K1 of the step: one read of all gradients gives the sum of squares and the non-finite flag.
//
// Note [Bundles of partials]
// A model of 1.5 billion parameters has 92,000 partials: 2 MB, which one block of a GPU would read
// for 50 us and more, while all others wait. There the partials of a list are added in two tiers.
// Places 0 to 31 are the first bundle, places 32 to 63 the second, and so on. The team that
// writes the last partial of a bundle adds the bundle, and the block that adds the last bundle has
// the sums of all of them to add. Which team that is depends on time; which numbers are added in
// which order depends on their places alone.
#pragma once

#include <cstdint>

#include "kernels/common/status.h"
#include "kernels/common/step_scalars.h"
#include "kernels/common/stream.h"
#include "kernels/common/tensor_table.h"
#include "kernels/cpu/isa.h"
#include "kernels/functors/l2_norm.h"
#include "kernels/prologue.h"

namespace torchfuse::kernels {

/// Chunks of `numel` elements: each has one partial.
constexpr std::int64_t num_norm_chunks(std::int64_t numel) {
  return (numel + kNormChunk - 1) / kNormChunk;
}

/// Partials that are added to one sum on CUDA devices: one for each lane of a warp.
constexpr std::int64_t kNormBundle = 32;

constexpr std::int64_t num_norm_bundles(std::int64_t partials) {
  return (partials + kNormBundle - 1) / kNormBundle;
}

struct L2NormArgs {
  TensorTable tensors;  ///< only rows[i].grad and rows[i].numel are used
  /// First chunk of each tensor: prefix sums of num_norm_chunks(numel), count + 1 of them.
  const std::int64_t* chunk_offsets = nullptr;
  /// On the tensors' device: one for each of chunk_offsets[count] chunks, all written.
  NormPartial* partials = nullptr;
};

/// Writes the partial of every chunk whose first flattened element lies in [begin, end).
void multi_tensor_l2_norm_cpu(CpuIsa isa, const L2NormArgs& args, std::int64_t begin,
                              std::int64_t end);

/// What a list's partials are added to. See Note [Bundles of partials].
struct NormBundles {
  NormPartial* sums = nullptr;  ///< one for each bundle, all written
  /// One counter for each bundle and one for the list: zero before and after. A list of which a
  /// launch fails may leave them as they are.
  std::uint32_t* arrivals = nullptr;
};

constexpr std::int64_t num_norm_arrivals(std::int64_t partials) {
  return 1 + num_norm_bundles(partials);
}

/// Enqueues the sums of the whole table. With `prologue`, the last block to finish also runs it;
/// the caller asks for it only if the sources of the other numbers that the prologue adds come
/// before this call on the stream. `*prologue_done` tells whether it ran: it does not for a table
/// without elements.
Status multi_tensor_l2_norm_cuda(const L2NormArgs& args, const NormBundles& bundles,
                                 const PrologueArgs* prologue, bool* prologue_done, Stream stream);

}  // namespace torchfuse::kernels
