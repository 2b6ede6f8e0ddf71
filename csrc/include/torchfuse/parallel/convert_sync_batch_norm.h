// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <string>

#include <torchfuse/export.h>

namespace torchfuse::parallel {

/// Attaches a process group to all nn::SyncBatchNorm layers of a model, including `model` itself.
/// C++ holds layers in typed members, so that a torch::nn::BatchNorm cannot become another class: a
/// warning names each one that is found.
///
/// @param model any module.
/// @param group name of the group, which must stay alive while the layers are used; an empty name
///   makes the layers plain batch normalization again.
/// @return number of layers that were attached.
TORCHFUSE_API std::int64_t convert_sync_batch_norm(torch::nn::Module& model,
                                                   const std::string& group);

}  // namespace torchfuse::parallel
