// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include <torchfuse/export.h>

namespace torchfuse {

/// Reduces `tensor` in place over the processes of each group in turn. The host does not wait for a
/// CUDA device, unless the tensor is on the CPU and the group's backend does not support CPU
/// tensors.
///
///     torchfuse::all_reduce_(loss, "avg", {group.name()});
///
/// @param tensor dense, with equal shape and dtype on all processes.
/// @param reduction "sum", "avg", "product", "min", "max", "band", "bor" or "bxor", if the group's
///   backend supports it.
/// @param groups process group names: `name()` of a torchfuse::parallel::ProcessGroup, or
///   `group.group_name` in Python. Python and init_process_group() register every group. C++
///   programs register other groups with `c10d::register_process_group(name, group)` and must keep
///   them alive.
/// @param caller start of error messages.
/// @throws c10::Error with the ranks that do not respond, as in all_reduce_sum_().
TORCHFUSE_API void all_reduce_(const at::Tensor& tensor, const std::string& reduction,
                               const std::vector<std::string>& groups,
                               const std::string& caller = "torchfuse::all_reduce_");

/// Replaces `tensor` by its sum over the ranks of a group, in place, on the current stream.
///
/// @param tensor contiguous, with equal shape and dtype on all ranks.
/// @param group name of a process group, as in all_reduce_().
/// @param caller name of the caller in error messages, such as "SyncBatchNorm 'layer1.bn1'".
/// @param deterministic true adds in rank order, through an all-gather whose payload grows with the
///   group; false (default) lets the backend choose the order.
/// @throws c10::Error naming the caller and the ranks that do not respond, if a rank exits or does
///   not arrive within the group's timeout (on the CPU; NCCL's watchdog ends the process).
TORCHFUSE_API void all_reduce_sum_(const at::Tensor& tensor, const std::string& group,
                                   const std::string& caller, bool deterministic = false);

/// Checks that all ranks of a group pass the same `values`. Synchronizes with the device.
///
/// @param names one name per number for the error message, such as "num_features".
/// @param values one number per name; equally many on all ranks.
/// @param device device on which the group's backend communicates.
/// @param group, caller as in all_reduce_sum_().
/// @throws c10::Error naming the first value that differs, with every rank's number.
TORCHFUSE_API void check_same_in_all_ranks(const std::vector<std::string>& names,
                                           const std::vector<std::int64_t>& values,
                                           const at::Device& device, const std::string& group,
                                           const std::string& caller);

/// Returns the number of ranks in a group.
/// @param group, caller as in all_reduce_sum_().
/// @throws c10::Error if no group has that name.
TORCHFUSE_API std::int64_t group_size(const std::string& group, const std::string& caller);

}  // namespace torchfuse
