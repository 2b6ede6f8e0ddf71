// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include <torchfuse/export.h>

namespace torchfuse {

/// Reduces `tensor` in place over the processes of each group in turn; the host does not wait for a
/// CUDA device.
///
/// @param tensor dense, of the same shape and dtype in all processes.
/// @param reduction "sum", "max" or another name that torch's functional collectives know.
/// @param groups names of process groups: `ProcessGroup::getGroupName()`, in Python
/// `group.group_name`. Python registers them by itself; C++ programs call
/// `c10d::register_process_group(name, group)` and keep the group.
TORCHFUSE_API void all_reduce_(const at::Tensor& tensor, const std::string& reduction,
                               const std::vector<std::string>& groups);

}  // namespace torchfuse
