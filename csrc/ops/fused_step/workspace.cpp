// SPDX-License-Identifier: BSD-3-Clause
#include "ops/fused_step/workspace.h"

#include <ATen/Functions.h>

#include <utility>

#include "ops/backend.h"

namespace torchfuse::ops {

void Workspace::reserve(std::int64_t doubles, const c10::Device& device) {
  if (!memory_.defined() || memory_.device() != device || memory_.numel() < doubles) {
    if (captured_) seen_by_captures_.push_back(std::move(memory_));
    memory_ = at::empty({doubles}, at::TensorOptions().dtype(at::kDouble).device(device));
    captured_ = false;
  }
  captured_ = captured_ || is_capturing(device);
}

}  // namespace torchfuse::ops
