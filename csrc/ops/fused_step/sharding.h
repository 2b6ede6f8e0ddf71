// SPDX-License-Identifier: BSD-3-Clause
// Sums over tensors that are split over processes.
//
// Note [Sharded parameters]
// A slot whose parameter is split over process groups (FSDP, tensor parallelism) holds this
// process's part of all its tensors. What is done element by element needs no more. The global norm
// and the norms of layerwise optimizers are summed over the groups: one collective for all tensors
// that are split alike and can be updated together. Every process must make the same collectives in
// the same order, so a slot with a gradient counts even where no element of it lies here.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace torchfuse::ops {

/// Replaces `partials` (the doubles of NormPartials) by their sums over the processes of all
/// groups.
void sum_over_shards(const at::Tensor& partials, const std::vector<std::string>& groups);

/// Replaces `sums` (the doubles of MeasurePartials) in the same way; the largest magnitudes only
/// where they are used.
void sum_measured_over_shards(const at::Tensor& sums, bool uses_largest,
                              const std::vector<std::string>& groups);

}  // namespace torchfuse::ops
