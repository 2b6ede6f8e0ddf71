// SPDX-License-Identifier: BSD-3-Clause
// K1 of the step: reads all gradients once and computes their sum of squares and the non-finite
// flag.
//
// Note [Bundles of partials]
// A model with 1.5 billion parameters has 92,000 partials (2 MB). One GPU block would need 50 us or
// more to read them, while all other blocks wait. On CUDA devices, a list's partials are therefore
// added in two tiers. Places 0 to 31 are the first bundle, places 32 to 63 the second, and so on.
// The team that writes a bundle's last partial adds the bundle, and the block that adds the last
// bundle then adds all bundles' sums. Timing decides which team adds a bundle. Which numbers are
// added, and in which order, depends only on their places.
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

/// Returns the number of chunks in `numel` elements. Each chunk has one partial.
constexpr std::int64_t num_norm_chunks(std::int64_t numel, std::int64_t chunk = kNormChunk) {
  return (numel + chunk - 1) / chunk;
}

/// Returns the chunk size on a CUDA device whose gradients have `total` elements. Small models have
/// smaller chunks: chunks of kNormChunk elements would leave some multiprocessors without a block,
/// and the others with a single block that waits for memory several times in sequence. The size
/// depends only on `total`, so that the same gradients have the same norm in every step. The size
/// is at least kWarpElements, because a small tensor is a single chunk.
constexpr std::int64_t norm_chunk_on_cuda(std::int64_t total) {
  constexpr std::int64_t kAimedChunks = 512;
  constexpr std::int64_t kLeast = 2048;
  std::int64_t chunk = kNormChunk;
  while (chunk > kLeast && total / chunk < kAimedChunks) chunk /= 2;
  return chunk;
}

/// Partials per sum on CUDA devices: one for each lane of a warp.
constexpr std::int64_t kNormBundle = 32;

constexpr std::int64_t num_norm_bundles(std::int64_t partials) {
  return (partials + kNormBundle - 1) / kNormBundle;
}

struct L2NormArgs {
  TensorTable tensors;  ///< only rows[i].grad and rows[i].numel are used
  /// Each tensor's first chunk: count + 1 prefix sums of num_norm_chunks(numel, chunk).
  const std::int64_t* chunk_offsets = nullptr;
  /// On the tensors' device: chunk_offsets[count] partials, one per chunk, all written.
  NormPartial* partials = nullptr;
  std::int64_t chunk = kNormChunk;  ///< always kNormChunk on the CPU
};

/// Writes the partial of every chunk whose first flattened element is in [begin, end).
void multi_tensor_l2_norm_cpu(CpuIsa isa, const L2NormArgs& args, std::int64_t begin,
                              std::int64_t end);

/// Sums to which a list's partials are added. See Note [Bundles of partials].
struct NormBundles {
  NormPartial* sums = nullptr;  ///< one per bundle, all written
  /// One counter per bundle and one for the list, zero before and after. A failed launch may leave
  /// other values.
  std::uint32_t* arrivals = nullptr;
};

constexpr std::int64_t num_norm_arrivals(std::int64_t partials) {
  return 1 + num_norm_bundles(partials);
}

/// Enqueues the sums of all tensors in the table. With `prologue`, the last block to finish also
/// runs the prologue. The caller may request this only if all other sums that the prologue adds
/// were enqueued earlier on the stream. `*prologue_done` tells whether the prologue ran: it does
/// not run for a table without elements.
Status multi_tensor_l2_norm_cuda(const L2NormArgs& args, const NormBundles& bundles,
                                 const PrologueArgs* prologue, bool* prologue_done, Stream stream);

}  // namespace torchfuse::kernels
