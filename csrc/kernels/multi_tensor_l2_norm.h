// SPDX-License-Identifier: BSD-3-Clause
// K1 of the step: one read of all gradients gives the sum of squares and the non-finite flag.
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

/// Slots that `numel` elements fill: every chunk of every tensor owns one.
constexpr std::int64_t num_norm_chunks(std::int64_t numel) {
  return (numel + kNormChunk - 1) / kNormChunk;
}

struct L2NormArgs {
  TensorTable tensors;  ///< only rows[i].grad and rows[i].numel are used
  /// First slot of each tensor: prefix sums of num_norm_chunks(numel), count + 1 of them.
  const std::int64_t* chunk_offsets = nullptr;
  NormPartial* partials =
      nullptr;  ///< on the tensors' device; chunk_offsets[count] of them, all written
};

/// Fills the chunk_offsets of every chunk whose first flattened element lies in [begin, end).
void multi_tensor_l2_norm_cpu(CpuIsa isa, const L2NormArgs& args, std::int64_t begin,
                              std::int64_t end);

/// Enqueues the sums of the whole table. With `prologue`, the last block to finish also runs the
/// prologue over the partials (`arrivals` must then be one zeroed counter, which is left zero); the
/// caller asks for it only if this call is the step's only source of partials. `*prologue_done`
/// tells whether it ran: it does not for a table without elements.
Status multi_tensor_l2_norm_cuda(const L2NormArgs& args, const PrologueArgs* prologue,
                                 std::uint32_t* arrivals, bool* prologue_done, Stream stream);

}  // namespace torchfuse::kernels
