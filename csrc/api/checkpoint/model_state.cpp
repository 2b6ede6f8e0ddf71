// SPDX-License-Identifier: BSD-3-Clause
#include "api/checkpoint/model_state.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <unordered_set>

namespace torchfuse::checkpoint {

namespace {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

void add_tensors(const torch::nn::Module& module, const std::string& prefix, NamedTensors& found) {
  const auto add = [&](const auto& tensors) {
    for (const auto& entry : tensors) {
      if (entry.value().defined()) found.emplace_back(prefix + entry.key(), entry.value());
    }
  };
  add(module.named_parameters(/*recurse=*/false));
  add(module.named_buffers(/*recurse=*/false));
  for (const auto& child : module.named_children()) {
    add_tensors(*child.value(), prefix + child.key() + ".", found);
  }
}

/// Checks in advance for errors of copy_(), and for values that copy_() would silently change,
/// because other objects are loaded by then.
void check_target(const at::Tensor& target, const at::Tensor& saved, const std::string& where) {
  TORCH_CHECK_VALUE(!target.is_inference() || c10::InferenceMode::is_enabled(), where,
                    " to go to a tensor that can be written, got one made in inference mode. "
                    "Construct the module outside inference mode.");
  TORCH_CHECK_VALUE(
      at::has_internal_overlap(target) != at::MemOverlap::Yes, where,
      " to go to a tensor with memory for each element, got an expanded one. Register "
      "tensor.contiguous() in the module.");
  TORCH_CHECK_VALUE(
      !target.is_meta(), where,
      " to go to a tensor with memory, got one on the device meta. Move the module to "
      "a device with to_empty() of its tensors first.");
  TORCH_CHECK_VALUE(target.layout() == at::kStrided && !target.is_quantized(), where,
                    " to go to a dense tensor, got one of layout ", target.layout(), " and dtype ",
                    target.scalar_type(), ".");
  TORCH_CHECK_VALUE(target.is_complex() || !saved.is_complex(), where,
                    " to be real, because the module's tensor is ", target.scalar_type(), ", got ",
                    saved.scalar_type(), ".");
}

}  // namespace

NamedTensors named_tensors(const torch::nn::Module& module) {
  NamedTensors found;
  add_tensors(module, "", found);
  return found;
}

std::function<void()> prepare_model(const torch::nn::Module& module, const Dict& saved,
                                    const std::string& where) {
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  std::unordered_set<std::string> names;
  for (const auto& [name, tensor] : named_tensors(module)) {
    const c10::IValue value = entry(saved, name, where);
    TORCH_CHECK_VALUE(value.isTensor(), where, "['", name, "'] to be a tensor, got a ",
                      type_name(value), ".");
    TORCH_CHECK_VALUE(value.toTensor().sizes() == tensor.sizes(), where, "['", name,
                      "'] to have the module's sizes ", tensor.sizes(), ", got ",
                      value.toTensor().sizes(), ".");
    check_target(tensor, value.toTensor(), where + "['" + name + "']");
    copies.emplace_back(tensor.detach(), value.toTensor());
    names.insert(name);
  }
  for (const auto& item : saved) {
    const bool known = item.key().isString() && names.count(item.key().toStringRef()) != 0;
    TORCH_CHECK_VALUE(known, where, " to hold the parameters and buffers of the module only, got ",
                      key_name(item.key()), " too. Load it into the module that was saved.");
  }
  return [copies] {
    const at::NoGradGuard no_grad;
    for (const auto& [target, source] : copies) target.copy_(source);
  };
}

}  // namespace torchfuse::checkpoint
