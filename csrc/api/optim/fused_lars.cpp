// SPDX-License-Identifier: BSD-3-Clause
// FusedLARS: what is particular to its options and states.
#include <torchfuse/optim/fused_lars.h>

#include "api/optim/fused_optimizer_step.h"

namespace torchfuse::optim {

template <>
struct OptionsTraits<FusedLARSOptions> {
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

  static void check(const FusedLARSOptions& options, const std::string& owner) {
    TORCH_CHECK_VALUE(!options.nesterov() || options.momentum() > 0.0, kName, ": expected ", owner,
                      ".nesterov to come with a momentum above 0, got ", options.momentum(),
                      ". Set one, or leave nesterov out.");
  }
};

template struct FusedOptionsOf<FusedLARSOptions>;
template struct FusedParamStateOf<FusedLARSParamState, FusedLARSOptions>;
template class FusedOptimizerOf<FusedLARSOptions, FusedLARSParamState>;

}  // namespace torchfuse::optim
