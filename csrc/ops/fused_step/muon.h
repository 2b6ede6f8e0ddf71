// SPDX-License-Identifier: BSD-3-Clause
// Muon's update of a bucket: see Note [Muon's passes] in kernels/functors/muon.h.
#pragma once

#include <vector>

#include "kernels/common/step_scalars.h"
#include "kernels/functors/muon.h"
#include "ops/bucket.h"
#include "ops/check.h"
#include "ops/fused_step/matrix_exchange.h"

namespace torchfuse::ops {

/// Throws if a parameter of a group with these hyper-parameters does not consist of matrices.
void check_muon_param(const Argument& argument, c10::IntArrayRef sizes,
                      const kernels::MuonParams& group);

/// Plans the exchanges of a bucket's sharded matrices. Throws on all ranks, which `caller` names,
/// if they do not list the same matrices.
void plan_muon_exchanges(const char* caller, const Bucket& bucket,
                         const std::vector<kernels::MuonParams>& groups,
                         MatrixExchanges& exchanges);

/// Runs or enqueues the update of a bucket, whose rows have layouts. `groups` are the optimizer's
/// parameter groups.
void update_muon(const char* op, const Bucket& bucket,
                 const std::vector<kernels::MuonParams>& groups,
                 const kernels::StepScalars* scalars, bool write_back_grads,
                 MatrixExchanges& exchanges);

}  // namespace torchfuse::ops
