// SPDX-License-Identifier: BSD-3-Clause
// How checkpoints save and load torchfuse's classes.
#pragma once

#include <torchfuse/checkpoint.h>

#include "api/checkpoint/values.h"

namespace torchfuse::checkpoint {

CheckpointPart model_part(torch::nn::Module& model);
CheckpointPart optimizer_part(optim::FusedOptimizer& optimizer);
CheckpointPart scaler_part(amp::GradScaler& scaler);
CheckpointPart scheduler_part(optim::LRScheduler& scheduler);
CheckpointPart sampler_part(parallel::DistributedSampler& sampler, std::int64_t& drawn);
CheckpointPart archived_part(std::function<void(torch::serialize::OutputArchive&)> save,
                             std::function<void(torch::serialize::InputArchive&)> load);

/// Returns the states of this process's default generators.
Dict generator_states();
/// Checks states from generator_states(), and returns the function that sets them.
std::function<void()> prepare_generators(const c10::IValue& saved);

}  // namespace torchfuse::checkpoint
