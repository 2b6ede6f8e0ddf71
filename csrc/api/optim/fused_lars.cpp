// SPDX-License-Identifier: BSD-3-Clause
// FusedLARS: what is particular to its options and states.
#include <torchfuse/optim/fused_lars.h>

#include "api/optim/fused_class_step.h"

namespace torchfuse::optim {

template <>
struct FusedClass<FusedLARSOptions> {
  static constexpr const char* kName = "FusedLARS";
  static constexpr const char* kAlgorithm = "lars";
  static constexpr std::size_t kRequired = 1;

  template <class Self, class Visit>
  static void options(Self& options, const Visit& visit) {
    visit("momentum", options.momentum());
    visit("weight_decay", options.weight_decay());
    visit("trust_coefficient", options.trust_coefficient());
    visit("eps", options.eps());
    visit("nesterov", options.nesterov());
    visit("maximize", options.maximize());
  }

  template <class Self, class Visit>
  static void states(Self& state, const Visit& visit) {
    visit("momentum_buffer", state.momentum_buffer());
  }

  static std::vector<HyperParam> hyper_params(const FusedLARSOptions& options) {
    return {options.lr(),
            options.momentum(),
            options.weight_decay(),
            options.trust_coefficient(),
            options.eps(),
            static_cast<double>(options.nesterov()),
            static_cast<double>(options.maximize())};
  }
};

template struct FusedOptionsOf<FusedLARSOptions>;
template struct FusedParamStateOf<FusedLARSParamState, FusedLARSOptions>;
template class FusedOptimizerOf<FusedLARSOptions, FusedLARSParamState>;

void FusedLARSOptions::check(const std::string& owner) const {
  FusedOptionsOf::check(owner);
  constexpr const char* kName = FusedClass<FusedLARSOptions>::kName;
  check_non_negative(kName, owner, "momentum", momentum());
  check_non_negative(kName, owner, "weight_decay", weight_decay());
  check_non_negative(kName, owner, "trust_coefficient", trust_coefficient());
  check_non_negative(kName, owner, "eps", eps());
  TORCH_CHECK_VALUE(!nesterov() || momentum() > 0.0, kName, ": expected ", owner,
                    ".nesterov to come with a momentum above 0, got ", momentum(),
                    ". Set one, or leave nesterov out.");
}

}  // namespace torchfuse::optim
