// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/Functions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/Exception.h>
#include <torch/library.h>
#include <torchfuse/collectives.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <exception>
#include <sstream>
#include <utility>

#include "ops/check.h"
#include "ops/distributed/process_groups.h"
#include "ops/registration.h"

namespace torchfuse {

namespace {

/// Calls one of torch's functional collectives, which find process groups by name. The call is
/// boxed because the C++ argument types differ between torch versions.
template <class... Args>
at::Tensor call_collective(const char* name, Args&&... args) {
  const auto op = c10::Dispatcher::singleton().findSchema({name, ""});
  TORCH_CHECK(op.has_value(), "torchfuse: expected the operator ", name,
              " for a reduction over processes, got none. Use a torch that was built with "
              "torch.distributed.");
  torch::jit::Stack stack;
  torch::jit::push(stack, std::forward<Args>(args)...);
  op->callBoxed(stack);
  return torch::jit::pop(stack).toTensor();
}

/// Returns the tensor, or a copy on a device that the group's backend supports. FSDP2 may keep
/// parameters on the CPU although their mesh consists of GPUs.
at::Tensor where_group_sends(const c10d::ProcessGroup& group, const at::Tensor& tensor) {
  const std::vector<c10::Device> devices = group.getDeviceTypes();
  const bool taken = std::any_of(devices.begin(), devices.end(), [&](const c10::Device& device) {
    return device.type() == tensor.device().type();
  });
  return taken || devices.empty() ? tensor : tensor.to(c10::Device(devices.front().type()));
}

void all_reduce_sum_impl(const at::Tensor& tensor, c10::string_view group_name,
                         c10::string_view caller_name, bool deterministic) {
  const std::string caller(caller_name);
  const auto group = ops::find_group(std::string(group_name), caller);
  if (deterministic) {
    const at::Tensor rows = ops::all_gather(*group, tensor, caller);
    at::Tensor sum = tensor.view({-1});
    sum.copy_(rows[0]);
    for (std::int64_t rank = 1; rank < group->getSize(); ++rank) sum.add_(rows[rank]);
    return;
  }
  c10d::AllreduceOptions options;
  options.asyncOp = false;
  std::vector<at::Tensor> tensors{tensor};
  const auto backend = group->getBackend(tensor.device().type());
  ops::run_collective(*group, caller, [&] { return backend->allreduce(tensors, options); });
  ops::mark_written(tensor);
}

}  // namespace

void all_reduce_(const at::Tensor& tensor, const std::string& reduction,
                 const std::vector<std::string>& groups, const std::string& caller) {
  for (const std::string& group : groups) {
    const auto process_group = ops::find_group(group, caller);
    const at::Tensor sent = where_group_sends(*process_group, tensor);
    const at::Tensor pending =
        call_collective("_c10d_functional::all_reduce_", sent, reduction, group);
    try {
      call_collective("_c10d_functional::wait_tensor", pending);
    } catch (const std::exception& error) {
      ops::fail_collective(*process_group, caller, error);
    }
    if (!sent.is_same(tensor)) tensor.copy_(sent);
  }
}

void all_reduce_sum_(const at::Tensor& tensor, const std::string& group, const std::string& caller,
                     bool deterministic) {
  ops::call_op<all_reduce_sum_impl>("torchfuse::all_reduce_sum_", tensor, group, caller,
                                    deterministic);
}

std::int64_t group_size(const std::string& group, const std::string& caller) {
  return ops::find_group(group, caller)->getSize();
}

void check_same_in_all_ranks(const std::vector<std::string>& names,
                             const std::vector<std::int64_t>& values, const at::Device& device,
                             const std::string& group, const std::string& caller) {
  TORCH_CHECK(names.size() == values.size(), caller, ": expected as many values as names, ",
              names.size(), ", got ", values.size(), ".");
  const auto process_group = ops::find_group(group, caller);
  const at::Tensor own = at::tensor(values, at::kLong).to(device);
  const at::Tensor rows = ops::all_gather(*process_group, own, caller).cpu();
  const auto table = rows.accessor<std::int64_t, 2>();
  for (std::size_t i = 0; i < names.size(); ++i) {
    std::ostringstream seen;
    bool same = true;
    for (std::int64_t rank = 0; rank < table.size(0); ++rank) {
      const std::int64_t value = table[rank][static_cast<std::int64_t>(i)];
      same = same && value == table[0][static_cast<std::int64_t>(i)];
      seen << (rank == 0 ? "" : ", ") << value;
    }
    TORCH_CHECK(same, caller, ": expected ", names[i],
                " to be the same in all ranks of the group '", group, "', got ", seen.str(),
                ". Build the same model in every process.");
  }
}

TORCH_LIBRARY_IMPL(torchfuse, CPU, m) { m.impl("all_reduce_sum_", all_reduce_sum_impl); }
TORCH_LIBRARY_IMPL(torchfuse, CUDA, m) { m.impl("all_reduce_sum_", all_reduce_sum_impl); }
TORCH_LIBRARY_IMPL(torchfuse, Meta, m) {
  m.impl("all_reduce_sum_", torch::CppFunction::makeFromBoxedFunction<&ops::trace_only>());
}

}  // namespace torchfuse
