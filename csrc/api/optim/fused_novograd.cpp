// SPDX-License-Identifier: BSD-3-Clause
// FusedNovoGrad: what is particular to its options and states.
#include <torchfuse/optim/fused_novograd.h>

#include "api/optim/fused_optimizer_step.h"

namespace torchfuse::optim {

template <>
struct OptionsTraits<FusedNovoGradOptions> {
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

template struct FusedOptionsOf<FusedNovoGradOptions>;
template struct FusedParamStateOf<FusedNovoGradParamState, FusedNovoGradOptions>;
template class FusedOptimizerOf<FusedNovoGradOptions, FusedNovoGradParamState>;

}  // namespace torchfuse::optim
