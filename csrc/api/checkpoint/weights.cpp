// SPDX-License-Identifier: BSD-3-Clause
#include <torchfuse/weights.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <utility>

#include "api/checkpoint/model_state.h"
#include "api/checkpoint/safetensors.h"

namespace torchfuse {

namespace {

/// Returns whether two tensors are one parameter or buffer with two names.
bool same_memory(const at::Tensor& one, const at::Tensor& other) {
  return one.is_same(other) ||
         (one.has_storage() && other.has_storage() && one.is_alias_of(other) &&
          one.storage_offset() == other.storage_offset() && one.sizes() == other.sizes() &&
          one.strides() == other.strides() && one.dtype() == other.dtype());
}

}  // namespace

void save_weights(const std::string& path, const torch::nn::Module& module,
                  std::map<std::string, std::string> metadata) {
  const at::NoGradGuard no_grad;
  metadata.try_emplace("format", "pt");
  checkpoint::write_safetensors(path, {checkpoint::named_tensors(module), std::move(metadata)},
                                "save_weights");
}

std::map<std::string, std::string> load_weights(const std::string& path,
                                                torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  const checkpoint::NamedWeights weights = checkpoint::read_safetensors(path, "load_weights");
  checkpoint::Dict saved = checkpoint::make_dict();
  for (const auto& [name, tensor] : weights.tensors) saved.insert_or_assign(name, tensor);
  const auto own = checkpoint::named_tensors(module);
  for (const auto& [name, tensor] : own) {
    if (saved.contains(name)) continue;
    for (const auto& [other, kept] : own) {
      if (saved.contains(other) && same_memory(tensor, kept)) {
        saved.insert_or_assign(name, saved.at(other));
        break;
      }
    }
  }
  checkpoint::prepare_model(module, saved, "load_weights: expected " + path)();
  return weights.metadata;
}

}  // namespace torchfuse
