// SPDX-License-Identifier: BSD-3-Clause
// Finds process groups by name, and runs collectives whose errors name the missing ranks.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <exception>
#include <functional>
#include <string>

namespace c10d {
class ProcessGroup;
class Work;
}  // namespace c10d

namespace torchfuse::ops {

/// Returns the group. Throws if no such group exists or if the group was destroyed.
c10::intrusive_ptr<c10d::ProcessGroup> find_group(const std::string& name,
                                                  const std::string& caller);

/// Throws for a failed collective, and names the ranks of which there is no sign.
[[noreturn]] void fail_collective(c10d::ProcessGroup& group, const std::string& caller,
                                  const std::exception& error);

/// Starts a collective and waits until the current stream (on the CPU, the caller) may use the
/// results. An error names the ranks of which there is no sign. A backend may return no Work for a
/// synchronous collective, as NCCL does since torch 2.8. The collective then runs on the current
/// stream, and no wait is needed.
void run_collective(c10d::ProcessGroup& group, const std::string& caller,
                    const std::function<c10::intrusive_ptr<c10d::Work>()>& start);

/// Gathers all ranks' tensors, which have equally many elements, as rows in rank order.
at::Tensor all_gather(c10d::ProcessGroup& group, const at::Tensor& tensor,
                      const std::string& caller);

}  // namespace torchfuse::ops
