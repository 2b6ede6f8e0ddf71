// SPDX-License-Identifier: BSD-3-Clause
// FusedAdagrad's options and states.
#include <torchfuse/optim/fused_adagrad.h>

#include "api/optim/fused_optimizer_step.h"

namespace torchfuse::optim {

template <>
struct OptionsTraits<FusedAdagradOptions> : Named<"FusedAdagrad", "adagrad"> {
  TORCHFUSE_FIELDS(options, lr_decay, eps, weight_decay, initial_accumulator_value, adagrad_w_mode,
                   maximize)
  TORCHFUSE_FIELDS(states, sum)

  static void begin_state(const FusedAdagradOptions& options, FusedSlot& slot, std::size_t index) {
    slot.states[index].fill_(options.initial_accumulator_value());
  }

  static void check(const FusedAdagradOptions& options, const std::string& owner) {
    const double initial = options.initial_accumulator_value();
    const HyperParamInfo& info = table_of<FusedAdagradOptions>().front();  // lr's range
    check_option(kName, owner, "initial_accumulator_value", info.violation(initial), initial);
  }
};

TORCHFUSE_DEFINE_OPTIMIZER(FusedAdagrad);

}  // namespace torchfuse::optim
