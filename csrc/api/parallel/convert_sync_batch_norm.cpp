// SPDX-License-Identifier: BSD-3-Clause
#include <torchfuse/parallel/convert_sync_batch_norm.h>

#include <c10/util/Exception.h>
#include <torch/nn/modules/batchnorm.h>

#include <torchfuse/nn/sync_batch_norm.h>

namespace torchfuse::parallel {

std::int64_t convert_sync_batch_norm(torch::nn::Module& model, const std::string& group) {
  std::int64_t attached = 0;
  const auto visit = [&](const std::string& name, torch::nn::Module& module) {
    if (auto* layer = dynamic_cast<nn::SyncBatchNormImpl*>(&module)) {
      layer->attach_group(group, name);
      ++attached;
    } else if (dynamic_cast<torch::nn::BatchNorm1dImpl*>(&module) != nullptr ||
               dynamic_cast<torch::nn::BatchNorm2dImpl*>(&module) != nullptr ||
               dynamic_cast<torch::nn::BatchNorm3dImpl*>(&module) != nullptr) {
      TORCH_WARN("convert_sync_batch_norm: layer '", name, "' is ", module.name(),
                 ", which keeps normalizing over this process's batch only. Declare it as "
                 "torchfuse::nn::SyncBatchNorm.");
    }
  };
  visit("", model);
  for (const auto& child : model.named_modules("", /*include_self=*/false)) {
    visit(child.key(), *child.value());
  }
  return attached;
}

}  // namespace torchfuse::parallel
