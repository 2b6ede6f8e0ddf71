// SPDX-License-Identifier: BSD-3-Clause
#include "ops/distributed/process_groups.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>
#include <torchfuse/missing_ranks.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace torchfuse::ops {

c10::intrusive_ptr<c10d::ProcessGroup> find_group(const std::string& name,
                                                  const std::string& caller) {
  try {
    return c10d::resolve_process_group(name);
  } catch (const c10::Error&) {
    TORCH_CHECK(
        false, caller, ": expected group to name a process group that exists, got '", name,
        "'. It was destroyed or never created: call torch.distributed.init_process_group or "
        "torchfuse::parallel::init_process_group first, and keep the group.");
  }
}

void fail_collective(c10d::ProcessGroup& group, const std::string& caller,
                     const std::exception& error) {
  const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
  const std::string failure = of_torch ? of_torch->what_without_backtrace() : error.what();
  TORCH_CHECK(false, caller, ": the exchange between the ", group.getSize(),
              " ranks of the process group '", group.getGroupName(), "' failed in rank ",
              group.getRank(), ". ", describe_missing_ranks(group),
              " The backend says: ", failure.substr(0, failure.find('\n')));
}

void run_collective(c10d::ProcessGroup& group, const std::string& caller,
                    const std::function<c10::intrusive_ptr<c10d::Work>()>& start) {
  try {
    if (const auto work = start()) work->wait();
  } catch (const std::exception& error) {
    fail_collective(group, caller, error);
  }
}

at::Tensor all_gather(c10d::ProcessGroup& group, const at::Tensor& tensor,
                      const std::string& caller) {
  // Gloo accepts only flat tensors.
  at::Tensor all = at::empty({group.getSize() * tensor.numel()}, tensor.options());
  at::Tensor own = tensor.view({-1});
  c10d::AllgatherOptions options;
  options.asyncOp = false;
  const auto backend = group.getBackend(tensor.device().type());
  run_collective(group, caller, [&] { return backend->_allgather_base(all, own, options); });
  return all.view({group.getSize(), tensor.numel()});
}

}  // namespace torchfuse::ops
