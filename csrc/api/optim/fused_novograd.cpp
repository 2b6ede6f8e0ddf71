// SPDX-License-Identifier: BSD-3-Clause
// FusedNovoGrad's options and states.
#include <torchfuse/optim/fused_novograd.h>

#include "api/optim/fused_optimizer_step.h"

namespace torchfuse::optim {

template <>
struct OptionsTraits<FusedNovoGradOptions> : Named<"FusedNovoGrad", "novograd"> {
  static constexpr std::size_t kTensorStates = 1;

  TORCHFUSE_FIELDS(options, betas, eps, weight_decay, bias_correction, reg_inside_moment,
                   grad_averaging, norm_type, init_zero, maximize)
  TORCHFUSE_FIELDS(states, exp_avg, exp_avg_norm)
  TORCHFUSE_FIELDS(state_dtypes, exp_avg_dtype)

  template <class Visit>
  static void derived(const FusedNovoGradOptions& options, const Visit& visit) {
    visit(OptionPart{"inf_norm"}, options.norm_type() == 0 ? 1.0 : 0.0);
  }

  static void check(const FusedNovoGradOptions& options, const std::string& owner) {
    const std::int64_t norm_type = options.norm_type();
    TORCH_CHECK_VALUE(norm_type == 0 || norm_type == 2, kName, ": expected ", owner,
                      ".norm_type to be 2 or 0 (the largest magnitude), got ", norm_type, ".");
  }
};

TORCHFUSE_DEFINE_OPTIMIZER(FusedNovoGrad);

}  // namespace torchfuse::optim
