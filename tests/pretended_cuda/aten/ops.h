// SPDX-License-Identifier: BSD-3-Clause
// Which ATen op is treated how.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace pretended_cuda {

inline bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

/// Keeps torch's own CUDA code: metadata, allocation, streams, and copies between host and device.
bool keeps_its_own_code(const c10::OperatorHandle& op);

/// Is redirected although CUDA has no kernel of that name: torch would choose among libraries for
/// it.
bool is_redirected_anyway(const c10::OperatorHandle& op);

/// Makes the host wait on a device with these arguments: an output's shape depends on data, or the
/// host looks at a result.
bool synchronizes(const c10::OperatorHandle& op, const torch::jit::Stack& arguments);

/// Has results on the CPU that its meta kernel does not describe.
bool differs_from_meta(const c10::OperatorHandle& op);

/// Has lists of tensors on several devices, as the steps of torch's optimizers are with others' on
/// the host. Torch's own code goes through such lists one by one.
bool spans_devices(const c10::OperatorHandle& op, const torch::jit::Stack& arguments);

}  // namespace pretended_cuda
