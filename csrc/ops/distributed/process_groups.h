// SPDX-License-Identifier: BSD-3-Clause
// Process groups by name, and collectives whose failures say who is missing.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <exception>
#include <functional>
#include <string>

namespace c10d {
class ProcessGroup;
class Work;
}  // namespace c10d

namespace torchfuse::ops {

/// Throws if there is no such group, or if it was destroyed.
c10::intrusive_ptr<c10d::ProcessGroup> find_group(const std::string& name,
                                                  const std::string& caller);

/// Throws for a collective that failed, with the ranks of which there is no sign.
[[noreturn]] void fail_collective(c10d::ProcessGroup& group, const std::string& caller,
                                  const std::exception& error);

/// Starts a collective and waits until the current stream, or on the CPU the caller, may use the
/// results; a failure is reported with the ranks of which there is no sign. A backend may give no
/// Work for what was not started as asynchronous, as NCCL's does since torch 2.8: the collective is
/// on the current stream, and there is nothing to wait for.
void run_collective(c10d::ProcessGroup& group, const std::string& caller,
                    const std::function<c10::intrusive_ptr<c10d::Work>()>& start);

}  // namespace torchfuse::ops
