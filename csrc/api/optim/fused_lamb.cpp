// SPDX-License-Identifier: BSD-3-Clause
// FusedLAMB: what is particular to its options and states.
#include <torchfuse/optim/fused_lamb.h>

#include <limits>

#include "api/optim/fused_optimizer_step.h"

namespace torchfuse::optim {

template <>
struct OptionsTraits<FusedLAMBOptions> {
  static constexpr const char* kName = "FusedLAMB";
  static constexpr const char* kAlgorithm = "lamb";
  static constexpr std::size_t kRequired = 2;

  template <class Self, class Visit>
  static void options(Self& options, const Visit& visit) {
    visit("betas", options.betas());
    visit("eps", options.eps());
    visit("weight_decay", options.weight_decay());
    visit("min_trust_ratio", options.min_trust_ratio());
    visit("max_trust_ratio", options.max_trust_ratio());
    visit("bias_correction", options.bias_correction());
    visit("adam_w_mode", options.adam_w_mode());
    visit("grad_averaging", options.grad_averaging());
    visit("use_nvlamb", options.use_nvlamb());
    visit("maximize", options.maximize());
  }

  template <class Self, class Visit>
  static void states(Self& state, const Visit& visit) {
    visit("exp_avg", state.exp_avg());
    visit("exp_avg_sq", state.exp_avg_sq());
  }

  template <class Self, class Visit>
  static void state_dtypes(Self& options, const Visit& visit) {
    visit("exp_avg_dtype", options.exp_avg_dtype());
    visit("exp_avg_sq_dtype", options.exp_avg_sq_dtype());
  }
};

template struct FusedOptionsOf<FusedLAMBOptions>;
template struct FusedParamStateOf<FusedLAMBParamState, FusedLAMBOptions>;
template class FusedOptimizerOf<FusedLAMBOptions, FusedLAMBParamState>;

}  // namespace torchfuse::optim
