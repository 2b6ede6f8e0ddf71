// SPDX-License-Identifier: BSD-3-Clause
#include "api/optim/lr_scheduler/inner_schedulers.h"

#include <c10/util/Exception.h>
#include <torchfuse/optim/lr_scheduler/reduce_lr_on_plateau.h>

#include <cstddef>

namespace torchfuse::optim {

torch::optim::Optimizer& check_inner(const char* owner,
                                     const std::vector<std::shared_ptr<LRScheduler>>& schedulers,
                                     torch::optim::Optimizer* optimizer) {
  TORCH_CHECK_VALUE(!schedulers.empty(), owner, ": expected at least one scheduler, got none.");
  for (std::size_t i = 0; i < schedulers.size(); ++i) {
    const LRScheduler* scheduler = schedulers[i].get();
    TORCH_CHECK_VALUE(scheduler != nullptr, owner, ": expected schedulers[", i,
                      "] to be a scheduler, got a null pointer.");
    TORCH_CHECK_VALUE(dynamic_cast<const ReduceLROnPlateau*>(scheduler) == nullptr, owner,
                      ": expected schedulers[", i,
                      "] to step without a metric, got a ReduceLROnPlateau. Step that by itself.");
    if (optimizer == nullptr) optimizer = &scheduler->optimizer();
    TORCH_CHECK_VALUE(&scheduler->optimizer() == optimizer, owner, ": expected schedulers[", i,
                      "] to belong to the same optimizer, got a ", scheduler->name(),
                      " of another one.");
  }
  return *optimizer;
}

}  // namespace torchfuse::optim
