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
constexpr std::int64_t num_norm_chunks(std::int64_t numel, std::int64_t chunk = kNormChunk) {
  return (numel + chunk - 1) / chunk;
}

/// Elements of a chunk on a CUDA device whose gradients have `total`: fewer for a small model, of
/// which chunks of kNormChunk would leave multiprocessors without a block, and the others with one
/// that waits for memory several times in sequence. Follows from `total` alone, so that the same
/// gradients have the same norm whatever the rest of a step is. At least kWarpElements, as a small
/// tensor is one chunk.
constexpr std::int64_t norm_chunk_on_cuda(std::int64_t total) {
  constexpr std::int64_t kAimedChunks = 512;
  constexpr std::int64_t kLeast = 2048;
  std::int64_t chunk = kNormChunk;
  while (chunk > kLeast && total / chunk < kAimedChunks) chunk /= 2;
  return chunk;
}

/// Partials that are added to one sum on CUDA devices: one for each lane of a warp.
constexpr std::int64_t kNormBundle = 32;

constexpr std::int64_t num_norm_bundles(std::int64_t partials) {
  return (partials + kNormBundle - 1) / kNormBundle;
}

struct L2NormArgs {
  TensorTable tensors;  ///< only rows[i].grad and rows[i].numel are used
  /// First chunk of each tensor: prefix sums of num_norm_chunks(numel, chunk), count + 1 of them.
  const std::int64_t* chunk_offsets = nullptr;
  /// On the tensors' device: one for each of chunk_offsets[count] chunks, all written.
  NormPartial* partials = nullptr;
  std::int64_t chunk = kNormChunk;  ///< which it always is on the CPU
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
