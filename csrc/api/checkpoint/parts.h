// SPDX-License-Identifier: BSD-3-Clause
// How checkpoints save and load archived objects and torch's generators.
#pragma once

#include <torchfuse/checkpoint.h>

#include "api/checkpoint/values.h"

namespace torchfuse::checkpoint {

CheckpointPart archived_part(std::function<void(torch::serialize::OutputArchive&)> save,
                             std::function<void(torch::serialize::InputArchive&)> load);

/// Returns the states of this process's default generators.
Dict generator_states();
/// Checks states from generator_states(), and returns the function that sets them.
std::function<void()> prepare_generators(const c10::IValue& saved);

}  // namespace torchfuse::checkpoint
