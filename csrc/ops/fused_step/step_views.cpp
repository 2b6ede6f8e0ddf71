// SPDX-License-Identifier: BSD-3-Clause
#include <torchfuse/step_views.h>

#include <ATen/Functions.h>
#include <c10/util/Exception.h>
#include <torchfuse/device_copy.h>

#include <map>
#include <set>
#include <string>
#include <utility>

#include "ops/check.h"

namespace torchfuse {

namespace {

/// An element in memory: storage and offset.
using Element = std::pair<const void*, std::int64_t>;

// Note [Step counts in one buffer]
// A device's step counts are elements of buffers that torchfuse allocates, so that the kernel that
// increments all counts touches few cache lines. A count in such a buffer stays there when
// parameters join, because a captured graph keeps incrementing the captured elements. A buffer has
// one element more than needed, which distinguishes the buffer from a tensor that a checkpoint
// provided.

/// Returns whether the step is an element of such a buffer, and no other step in `taken` is the
/// same element.
bool is_own_element(const at::Tensor& step, const c10::Device& device, std::set<Element>& taken) {
  if (!step.defined() || step.device() != device || step.scalar_type() != at::kFloat ||
      step.dim() != 0 || !step.has_storage() || step.storage().nbytes() <= sizeof(float)) {
    return false;
  }
  return taken.emplace(step.storage().unsafeGetStorageImpl(), step.storage_offset()).second;
}

}  // namespace

std::vector<at::Tensor> step_views(const std::vector<at::Tensor>& params,
                                   std::vector<at::Tensor> steps) {
  ops::check_same_length("step_views", "steps", steps.size(), params.size(), "params");
  std::set<Element> taken;
  std::map<std::string, std::vector<std::size_t>> others;  // by device
  for (std::size_t i = 0; i < params.size(); ++i) {
    const c10::Device device = params[i].device();
    if (!is_own_element(steps[i], device, taken)) others[device.str()].push_back(i);
  }
  for (const auto& [name, members] : others) {
    const c10::Device device(name);
    // Created on the device, because a copy from or to the host would synchronize.
    const auto options = at::TensorOptions().dtype(at::kFloat).device(device);
    const at::Tensor buffer = at::zeros({static_cast<std::int64_t>(members.size()) + 1}, options);
    for (std::size_t k = 0; k < members.size(); ++k) {
      const at::Tensor& step = steps[members[k]];
      if (!step.defined()) continue;
      TORCH_CHECK(step.numel() == 1, "step_views: expected steps[", members[k],
                  "] to hold one element, got ", step.numel(), ".");
      buffer[static_cast<std::int64_t>(k)].copy_(to_device(step.reshape({}), device));
    }
    for (std::size_t k = 0; k < members.size(); ++k) {
      steps[members[k]] = buffer.select(0, static_cast<std::int64_t>(k));
    }
  }
  return steps;
}

}  // namespace torchfuse
