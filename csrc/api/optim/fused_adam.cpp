// SPDX-License-Identifier: BSD-3-Clause
// FusedAdam: what is particular to its options and states.
#include <torchfuse/optim/fused_adam.h>

#include "api/optim/fused_class_step.h"

namespace torchfuse::optim {

template <>
struct FusedClass<FusedAdamOptions> {
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

  static std::vector<HyperParam> hyper_params(const FusedAdamOptions& options) {
    return {options.lr(),
            std::get<0>(options.betas()),
            std::get<1>(options.betas()),
            options.eps(),
            options.weight_decay(),
            static_cast<double>(options.bias_correction()),
            static_cast<double>(options.adam_w_mode()),
            static_cast<double>(options.amsgrad()),
            static_cast<double>(options.maximize())};
  }
};

template struct FusedOptionsOf<FusedAdamOptions>;
template struct FusedParamStateOf<FusedAdamParamState, FusedAdamOptions>;
template class FusedOptimizerOf<FusedAdamOptions, FusedAdamParamState>;

void FusedAdamOptions::check(const std::string& owner) const {
  FusedOptionsOf::check(owner);
  constexpr const char* kName = FusedClass<FusedAdamOptions>::kName;
  check_below_one(kName, owner, "betas[0]", std::get<0>(betas()));
  check_below_one(kName, owner, "betas[1]", std::get<1>(betas()));
  check_non_negative(kName, owner, "eps", eps());
  check_non_negative(kName, owner, "weight_decay", weight_decay());
}

}  // namespace torchfuse::optim
