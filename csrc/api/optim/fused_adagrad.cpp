// SPDX-License-Identifier: BSD-3-Clause
// FusedAdagrad: what is particular to its options and states.
#include <torchfuse/optim/fused_adagrad.h>

#include "api/optim/fused_class_step.h"

namespace torchfuse::optim {

template <>
struct FusedClass<FusedAdagradOptions> {
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

  static std::vector<HyperParam> hyper_params(const FusedAdagradOptions& options) {
    return {options.lr(),
            options.lr_decay(),
            options.eps(),
            options.weight_decay(),
            static_cast<double>(options.adagrad_w_mode()),
            static_cast<double>(options.maximize())};
  }
};

template struct FusedOptionsOf<FusedAdagradOptions>;
template struct FusedParamStateOf<FusedAdagradParamState, FusedAdagradOptions>;
template class FusedOptimizerOf<FusedAdagradOptions, FusedAdagradParamState>;

void FusedAdagradOptions::check(const std::string& owner) const {
  FusedOptionsOf::check(owner);
  constexpr const char* kName = FusedClass<FusedAdagradOptions>::kName;
  check_non_negative(kName, owner, "lr_decay", lr_decay());
  check_non_negative(kName, owner, "eps", eps());
  check_non_negative(kName, owner, "weight_decay", weight_decay());
  check_non_negative(kName, owner, "initial_accumulator_value", initial_accumulator_value());
}

}  // namespace torchfuse::optim
