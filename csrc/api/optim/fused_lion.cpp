// SPDX-License-Identifier: BSD-3-Clause
// FusedLion: what is particular to its options and states.
#include <torchfuse/optim/fused_lion.h>

#include "api/optim/fused_optimizer_step.h"

namespace torchfuse::optim {

template <>
struct OptionsTraits<FusedLionOptions> {
  static constexpr const char* kName = "FusedLion";
  static constexpr const char* kAlgorithm = "lion";
  static constexpr std::size_t kRequired = 1;

  template <class Self, class Visit>
  static void options(Self& options, const Visit& visit) {
    visit("betas", options.betas());
    visit("weight_decay", options.weight_decay());
    visit("maximize", options.maximize());
  }

  template <class Self, class Visit>
  static void states(Self& state, const Visit& visit) {
    visit("exp_avg", state.exp_avg());
  }

  template <class Self, class Visit>
  static void state_dtypes(Self& options, const Visit& visit) {
    visit("exp_avg_dtype", options.exp_avg_dtype());
  }
};

template struct FusedOptionsOf<FusedLionOptions>;
template struct FusedParamStateOf<FusedLionParamState, FusedLionOptions>;
template class FusedOptimizerOf<FusedLionOptions, FusedLionParamState>;

}  // namespace torchfuse::optim
