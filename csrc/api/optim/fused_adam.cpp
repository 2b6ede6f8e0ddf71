// SPDX-License-Identifier: BSD-3-Clause
// FusedAdam's options and states.
#include <torchfuse/optim/fused_adam.h>

#include "api/optim/fused_optimizer_step.h"

namespace torchfuse::optim {

template <>
struct OptionsTraits<FusedAdamOptions> : Named<"FusedAdam", "adam"> {
  TORCHFUSE_FIELDS(options, betas, eps, weight_decay, bias_correction, adam_w_mode, amsgrad,
                   maximize)
  TORCHFUSE_FIELDS(states, exp_avg, exp_avg_sq, max_exp_avg_sq)
  TORCHFUSE_FIELDS(state_dtypes, exp_avg_dtype, exp_avg_sq_dtype)

  static bool uses_state(const FusedAdamOptions& options, std::size_t index) {
    return index < 2 || options.amsgrad();
  }
};

TORCHFUSE_DEFINE_OPTIMIZER(FusedAdam);

}  // namespace torchfuse::optim
