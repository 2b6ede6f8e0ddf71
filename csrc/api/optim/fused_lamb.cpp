// SPDX-License-Identifier: BSD-3-Clause
// FusedLAMB's options and states.
#include <torchfuse/optim/fused_lamb.h>

#include "api/optim/fused_optimizer_step.h"

namespace torchfuse::optim {

template <>
struct OptionsTraits<FusedLAMBOptions> : Named<"FusedLAMB", "lamb"> {
  TORCHFUSE_FIELDS(options, betas, eps, weight_decay, min_trust_ratio, max_trust_ratio,
                   bias_correction, adam_w_mode, grad_averaging, use_nvlamb, maximize)
  TORCHFUSE_FIELDS(states, exp_avg, exp_avg_sq)
  TORCHFUSE_FIELDS(state_dtypes, exp_avg_dtype, exp_avg_sq_dtype)
};

TORCHFUSE_DEFINE_OPTIMIZER(FusedLAMB);

}  // namespace torchfuse::optim
