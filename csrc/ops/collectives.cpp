// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/Exception.h>
#include <torchfuse/collectives.h>

#include <utility>

namespace torchfuse {

namespace {

/// One of torch's functional collectives, which know process groups by name. Boxed: the C++ types
/// of their arguments differ between versions of torch.
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

}  // namespace

void all_reduce_(const at::Tensor& tensor, const std::string& reduction,
                 const std::vector<std::string>& groups) {
  for (const std::string& group : groups) {
    const at::Tensor pending =
        call_collective("_c10d_functional::all_reduce_", tensor, reduction, group);
    call_collective("_c10d_functional::wait_tensor", pending);
  }
}

}  // namespace torchfuse
