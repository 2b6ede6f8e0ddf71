// SPDX-License-Identifier: BSD-3-Clause
#include "ops/sharding.h"

#include <ATen/Functions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/Exception.h>
#include <torchfuse/all_reduce.h>

#include "kernels/layerwise_optimizer.h"

namespace torchfuse {

namespace {

/// One of torch's functional collectives, which know process groups by name. Boxed: the C++ types
/// of their arguments differ between versions of torch.
template <class... Args>
at::Tensor call_collective(const char* name, Args&&... args) {
  const auto op = c10::Dispatcher::singleton().findSchema({name, ""});
  TORCH_CHECK(op.has_value(), "all_reduce_: expected the operator ", name,
              " for tensors that are split over processes, got none. Use a torch that was built "
              "with torch.distributed.");
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

namespace torchfuse::ops {

void sum_over_shards(const at::Tensor& partials, const std::vector<std::string>& groups) {
  constexpr std::int64_t kDoubles = sizeof(kernels::NormPartial) / sizeof(double);
  constexpr std::int64_t kNonfinite = offsetof(kernels::NormPartial, nonfinite) / sizeof(double);
  // As bits the flag would be a denormal number, which an addition may flush.
  const at::Tensor flags = partials.view({-1, kDoubles}).select(1, kNonfinite);
  const at::Tensor bits = flags.view(at::kLong);
  flags.copy_(bits.ne(0));
  all_reduce_(partials, "sum", groups);
  bits.copy_(flags.ne(0.0));
}

void sum_measured_over_shards(const at::Tensor& sums, bool uses_largest,
                              const std::vector<std::string>& groups) {
  constexpr std::int64_t kDoubles = sizeof(kernels::MeasurePartial) / sizeof(double);
  constexpr std::int64_t kLargest = offsetof(kernels::MeasurePartial, largest) / sizeof(double);
  const at::Tensor magnitudes = sums.view({-1, kDoubles}).select(1, kLargest);
  const at::Tensor largest = uses_largest ? magnitudes.clone() : at::Tensor();
  all_reduce_(sums, "sum", groups);
  if (!uses_largest) return;
  all_reduce_(largest, "max", groups);
  magnitudes.copy_(largest);
}

}  // namespace torchfuse::ops
