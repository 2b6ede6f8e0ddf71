// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <string>

#include <torchfuse/export.h>

namespace torchfuse::parallel {

/// Attaches a process group to all nn::SyncBatchNorm layers in a model, including `model` itself.
/// C++ modules store layers in typed members, so a torch::nn::BatchNorm cannot be replaced by
/// another class. The function warns about each such layer by name.
///
///     torchfuse::parallel::convert_sync_batch_norm(*net, group.name());
///
/// @param model any module.
/// @param group name of the group, which must stay open while the layers are used; an empty name
///   turns the layers back into plain batch normalization.
/// @return number of layers that were attached.
TORCHFUSE_API std::int64_t convert_sync_batch_norm(torch::nn::Module& model,
                                                   const std::string& group);

}  // namespace torchfuse::parallel
