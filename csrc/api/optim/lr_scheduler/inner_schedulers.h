// SPDX-License-Identifier: BSD-3-Clause
// Checks of the schedulers within another.
#pragma once

#include <torchfuse/optim/lr_scheduler.h>

#include <memory>
#include <vector>

namespace torchfuse::optim {

/// Throws, naming `owner` and the place, unless there are schedulers, all of `optimizer` (null: of
/// the first one's), and none that steps by a metric. Returns the optimizer.
torch::optim::Optimizer& check_inner(const char* owner,
                                     const std::vector<std::shared_ptr<LRScheduler>>& schedulers,
                                     torch::optim::Optimizer* optimizer = nullptr);

}  // namespace torchfuse::optim
