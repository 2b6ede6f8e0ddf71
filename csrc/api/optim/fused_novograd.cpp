// SPDX-License-Identifier: BSD-3-Clause
// FusedNovoGrad: what is particular to its options and states.
#include <torchfuse/optim/fused_novograd.h>

#include "api/optim/fused_class_step.h"

namespace torchfuse::optim {

template <>
struct FusedClass<FusedNovoGradOptions> {
  static constexpr const char* kName = "FusedNovoGrad";
  static constexpr const char* kAlgorithm = "novograd";
  static constexpr std::size_t kRequired = 2;
  static constexpr std::size_t kTensorStates = 1;

  template <class Self, class Visit>
  static void options(Self& options, const Visit& visit) {
    visit("betas", options.betas());
    visit("eps", options.eps());
    visit("weight_decay", options.weight_decay());
    visit("bias_correction", options.bias_correction());
    visit("reg_inside_moment", options.reg_inside_moment());
    visit("grad_averaging", options.grad_averaging());
    visit("norm_type", options.norm_type());
    visit("init_zero", options.init_zero());
    visit("maximize", options.maximize());
  }

  template <class Self, class Visit>
  static void states(Self& state, const Visit& visit) {
    visit("exp_avg", state.exp_avg());
    visit("exp_avg_norm", state.exp_avg_norm());
  }

  template <class Self, class Visit>
  static void state_dtypes(Self& options, const Visit& visit) {
    visit("exp_avg_dtype", options.exp_avg_dtype());
  }

  static std::vector<HyperParam> hyper_params(const FusedNovoGradOptions& options) {
    return {options.lr(),
            std::get<0>(options.betas()),
            std::get<1>(options.betas()),
            options.eps(),
            options.weight_decay(),
            static_cast<double>(options.bias_correction()),
            static_cast<double>(options.grad_averaging()),
            static_cast<double>(options.reg_inside_moment()),
            static_cast<double>(options.norm_type() == 0),
            static_cast<double>(options.init_zero()),
            static_cast<double>(options.maximize())};
  }
};

template struct FusedOptionsOf<FusedNovoGradOptions>;
template struct FusedParamStateOf<FusedNovoGradParamState, FusedNovoGradOptions>;
template class FusedOptimizerOf<FusedNovoGradOptions, FusedNovoGradParamState>;

void FusedNovoGradOptions::check(const std::string& owner) const {
  FusedOptionsOf::check(owner);
  constexpr const char* kName = FusedClass<FusedNovoGradOptions>::kName;
  check_below_one(kName, owner, "betas[0]", std::get<0>(betas()));
  check_below_one(kName, owner, "betas[1]", std::get<1>(betas()));
  check_non_negative(kName, owner, "eps", eps());
  check_non_negative(kName, owner, "weight_decay", weight_decay());
  TORCH_CHECK_VALUE(norm_type() == 0 || norm_type() == 2, kName, ": expected ", owner,
                    ".norm_type to be 2 or 0 (the largest magnitude), got ", norm_type(), ".");
}

}  // namespace torchfuse::optim
