// SPDX-License-Identifier: BSD-3-Clause
// FusedAdagrad: what is particular to its options and states.
#include <torchfuse/optim/fused_adagrad.h>

#include "api/optim/fused_optimizer_step.h"

namespace torchfuse::optim {

template <>
struct OptionsTraits<FusedAdagradOptions> {
  static constexpr const char* kName = "FusedAdagrad";
  static constexpr const char* kAlgorithm = "adagrad";
  static constexpr std::size_t kRequired = 1;

  template <class Self, class Visit>
  static void options(Self& options, const Visit& visit) {
    visit("lr_decay", options.lr_decay());
    visit("eps", options.eps());
    visit("weight_decay", options.weight_decay());
    visit("initial_accumulator_value", options.initial_accumulator_value());
    visit("adagrad_w_mode", options.adagrad_w_mode());
    visit("maximize", options.maximize());
  }

  template <class Self, class Visit>
  static void states(Self& state, const Visit& visit) {
    visit("sum", state.sum());
  }

  static void begin_state(const FusedAdagradOptions& options, FusedSlot& slot, std::size_t index) {
    slot.states[index].fill_(options.initial_accumulator_value());
  }

  static void check(const FusedAdagradOptions& options, const std::string& owner) {
    const double initial = options.initial_accumulator_value();
    const HyperParamInfo& info = table_of<FusedAdagradOptions>().front();  // lr's range
    check_option(kName, owner, "initial_accumulator_value", info.violation(initial), initial);
  }
};

template struct FusedOptionsOf<FusedAdagradOptions>;
template struct FusedParamStateOf<FusedAdagradParamState, FusedAdagradOptions>;
template class FusedOptimizerOf<FusedAdagradOptions, FusedAdagradParamState>;

}  // namespace torchfuse::optim
