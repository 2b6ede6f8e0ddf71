// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include <torchfuse/export.h>

namespace torchfuse {

/// Reduces `tensor` in place over the processes of each group in turn; the host does not wait for a
/// CUDA device, unless the tensor is on the CPU and the group's backend takes none from there.
///
/// @param tensor dense, of the same shape and dtype in all processes.
/// @param reduction "sum", "avg", "product", "min", "max", "band", "bor" or "bxor", as far as the
///   group's backend has it.
/// @param groups names of process groups: `name()` of a torchfuse::parallel::ProcessGroup, in
///   Python `group.group_name`. Python and init_process_group() register every group; for other
///   groups of C++ programs call `c10d::register_process_group(name, group)`, and keep the group.
/// @param caller begins messages.
/// @throws c10::Error with the ranks that do not respond, as all_reduce_sum_().
TORCHFUSE_API void all_reduce_(const at::Tensor& tensor, const std::string& reduction,
                               const std::vector<std::string>& groups,
                               const std::string& caller = "torchfuse::all_reduce_");

/// Replaces `tensor` by its sum over the ranks of a group, in place, on the current stream.
///
/// @param tensor contiguous, of the same shape and dtype in all ranks.
/// @param group name of a process group, as in all_reduce_().
/// @param caller name of the caller in error messages, such as "SyncBatchNorm 'layer1.bn1'".
/// @param deterministic true adds ranks in their order, through a gather whose payload grows with
///   the group; false lets the backend choose the order.
/// @throws c10::Error naming the caller and the ranks that do not respond, if a rank ends or does
///   not arrive within the group's timeout (on the CPU; NCCL's watchdog ends the process).
TORCHFUSE_API void all_reduce_sum_(const at::Tensor& tensor, const std::string& group,
                                   const std::string& caller, bool deterministic = false);

/// Throws unless `values` are the same numbers in all ranks of a group. Waits for the device.
///
/// @param names what each number is, for the error message: "num_features".
/// @param values one number for each name; equally many in all ranks.
/// @param device device on which the group's backend communicates.
/// @param group, caller as in all_reduce_sum_().
TORCHFUSE_API void check_same_in_all_ranks(const std::vector<std::string>& names,
                                           const std::vector<std::int64_t>& values,
                                           const at::Device& device, const std::string& group,
                                           const std::string& caller);

/// Returns the number of ranks of a group. Throws if there is no group of that name.
TORCHFUSE_API std::int64_t group_size(const std::string& group, const std::string& caller);

}  // namespace torchfuse
