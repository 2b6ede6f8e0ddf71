// SPDX-License-Identifier: BSD-3-Clause
// FusedAdam: what is particular to its options and states.
#include <torchfuse/optim/fused_adam.h>

#include "api/optim/fused_optimizer_step.h"

namespace torchfuse::optim {

template <>
struct OptionsTraits<FusedAdamOptions> {
  static constexpr const char* kName = "FusedAdam";
  static constexpr const char* kAlgorithm = "adam";
  static constexpr std::size_t kRequired = 2;

  template <class Self, class Visit>
  static void options(Self& options, const Visit& visit) {
    visit("betas", options.betas());
    visit("eps", options.eps());
    visit("weight_decay", options.weight_decay());
    visit("bias_correction", options.bias_correction());
    visit("adam_w_mode", options.adam_w_mode());
    visit("amsgrad", options.amsgrad());
    visit("maximize", options.maximize());
  }

  template <class Self, class Visit>
  static void states(Self& state, const Visit& visit) {
    visit("exp_avg", state.exp_avg());
    visit("exp_avg_sq", state.exp_avg_sq());
    visit("max_exp_avg_sq", state.max_exp_avg_sq());
  }

  template <class Self, class Visit>
  static void state_dtypes(Self& options, const Visit& visit) {
    visit("exp_avg_dtype", options.exp_avg_dtype());
    visit("exp_avg_sq_dtype", options.exp_avg_sq_dtype());
  }

  static bool uses_state(const FusedAdamOptions& options, std::size_t index) {
    return index < 2 || options.amsgrad();
  }
};

template struct FusedOptionsOf<FusedAdamOptions>;
template struct FusedParamStateOf<FusedAdamParamState, FusedAdamOptions>;
template class FusedOptimizerOf<FusedAdamOptions, FusedAdamParamState>;

}  // namespace torchfuse::optim
