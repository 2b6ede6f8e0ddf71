// SPDX-License-Identifier: BSD-3-Clause
// FusedLARS's options and states.
#include <torchfuse/optim/fused_lars.h>

#include "api/optim/fused_optimizer_step.h"

namespace torchfuse::optim {

template <>
struct OptionsTraits<FusedLARSOptions> : Named<"FusedLARS", "lars"> {
  TORCHFUSE_FIELDS(options, momentum, weight_decay, trust_coefficient, eps, nesterov, maximize)
  TORCHFUSE_FIELDS(states, momentum_buffer)

  static void check_new(const FusedLARSOptions& options, const std::string& owner) {
    TORCH_CHECK_VALUE(!options.nesterov() || options.momentum() > 0.0, kName, ": expected ", owner,
                      ".nesterov to come with a momentum above 0, got ", options.momentum(),
                      ". Set one, or leave nesterov out.");
  }
};

TORCHFUSE_DEFINE_OPTIMIZER(FusedLARS);

}  // namespace torchfuse::optim
