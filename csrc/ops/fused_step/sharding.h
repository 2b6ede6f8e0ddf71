// SPDX-License-Identifier: BSD-3-Clause
// Sums over tensors that are sharded over processes.
//
// Note [Sharded parameters]
// A slot whose parameter is sharded over process groups (FSDP, tensor parallelism) contains this
// process's shard of every tensor. Elementwise work needs nothing more. The global norm and the
// layerwise optimizers' norms are summed over the groups, in one collective for all tensors that
// have the same sharding and can be updated together. Every process must run the same collectives
// in the same order, so a slot with a gradient takes part even if its local shard is empty.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace torchfuse::ops {

/// Replaces `partials` (NormPartials as doubles) by their sums over the processes of all groups.
void sum_over_shards(const at::Tensor& partials, const std::vector<std::string>& groups);

/// Replaces `sums` (MeasurePartials as doubles) in the same way. Reduces the largest magnitudes
/// only if `uses_largest` is true.
void sum_measured_over_shards(const at::Tensor& sums, bool uses_largest,
                              const std::vector<std::string>& groups);

}  // namespace torchfuse::ops
