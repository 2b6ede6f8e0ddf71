// SPDX-License-Identifier: BSD-3-Clause
// Runs the batch normalization kernels on the input's device, and allocates their workspaces.
#pragma once

#include "kernels/batch_norm.h"
#include "kernels/batch_norm_backward.h"
#include "ops/batch_norm/batch_norm_tensors.h"

namespace torchfuse::ops {

void run_batch_norm_stats(const char* op, const BatchNormSource& source,
                          kernels::BatchNormStatsArgs& args);

/// Writes reduced moments to `finish.saved` and the running statistics, and then computes the
/// output.
void run_batch_norm_elemt(const char* op, const BatchNormSource& source,
                          const kernels::BatchNormFinishArgs& finish,
                          kernels::BatchNormElemtArgs& args);

void run_batch_norm_backward_reduce(const char* op, const BatchNormSource& source,
                                    kernels::BatchNormBackwardReduceArgs& args);

void run_batch_norm_backward_elemt(const char* op, const BatchNormSource& source,
                                   kernels::BatchNormBackwardElemtArgs& args);

}  // namespace torchfuse::ops
