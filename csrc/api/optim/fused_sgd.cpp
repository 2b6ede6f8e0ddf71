// SPDX-License-Identifier: BSD-3-Clause
// FusedSGD's options and states.
#include <torchfuse/optim/fused_sgd.h>

#include "api/optim/fused_optimizer_step.h"

namespace torchfuse::optim {

template <>
struct OptionsTraits<FusedSGDOptions> : Named<"FusedSGD", "sgd"> {
  TORCHFUSE_FIELDS(options, momentum, dampening, weight_decay, nesterov, wd_after_momentum,
                   maximize)
  TORCHFUSE_FIELDS(states, momentum_buffer)

  static bool uses_state(const FusedSGDOptions& options, std::size_t /*index*/) {
    return options.momentum() != 0.0;
  }

  /// The momentum buffer may be created after the first step.
  static constexpr bool kHasStart = true;
  static void begin_state(const FusedSGDOptions& /*options*/, FusedSlot& slot,
                          std::size_t /*index*/) {
    if (slot.step.defined()) slot.start = slot.step.clone();
  }

  static void check_new(const FusedSGDOptions& options, const std::string& owner) {
    const double momentum = options.momentum();
    const double dampening = options.dampening();
    TORCH_CHECK_VALUE(!options.nesterov() || (momentum > 0.0 && dampening == 0.0), kName,
                      ": expected ", owner,
                      ".nesterov to come with a momentum above 0 and a dampening of 0, got ",
                      momentum, " and ", dampening, ". Set both, or leave nesterov out.");
  }
};

TORCHFUSE_DEFINE_OPTIMIZER(FusedSGD);

}  // namespace torchfuse::optim
