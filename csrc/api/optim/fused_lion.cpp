// SPDX-License-Identifier: BSD-3-Clause
// FusedLion's options and states.
#include <torchfuse/optim/fused_lion.h>

#include "api/optim/fused_optimizer_step.h"

namespace torchfuse::optim {

template <>
struct OptionsTraits<FusedLionOptions> : Named<"FusedLion", "lion"> {
  TORCHFUSE_FIELDS(options, betas, weight_decay, maximize)
  TORCHFUSE_FIELDS(states, exp_avg)
  TORCHFUSE_FIELDS(state_dtypes, exp_avg_dtype)
};

TORCHFUSE_DEFINE_OPTIMIZER(FusedLion);

}  // namespace torchfuse::optim
