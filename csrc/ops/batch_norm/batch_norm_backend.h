// SPDX-License-Identifier: BSD-3-Clause
// Runs the kernels of batch normalization where the input lies. Fills in the workspaces.
#pragma once

#include "kernels/batch_norm.h"
#include "kernels/batch_norm_backward.h"
#include "ops/batch_norm/batch_norm_tensors.h"

namespace torchfuse::ops {

void run_batch_norm_stats(const char* op, const BatchNormSource& source,
                          kernels::BatchNormStatsArgs& args);

/// Reduced moments to `finish.saved` and running statistics, then the output.
void run_batch_norm_elemt(const char* op, const BatchNormSource& source,
                          const kernels::BatchNormFinishArgs& finish,
                          kernels::BatchNormElemtArgs& args);

void run_batch_norm_backward_reduce(const char* op, const BatchNormSource& source,
                                    kernels::BatchNormBackwardReduceArgs& args);

void run_batch_norm_backward_elemt(const char* op, const BatchNormSource& source,
                                   kernels::BatchNormBackwardElemtArgs& args);

}  // namespace torchfuse::ops
