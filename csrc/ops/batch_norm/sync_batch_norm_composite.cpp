// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torchfuse/collectives.h>

#include "ops/batch_norm/sync_batch_norm.h"

namespace torchfuse::ops {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Sums over ranks. Every rank's summand receives the gradients of all ranks' results.
class SumOverRanks : public torch::autograd::Function<SumOverRanks> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& tensor,
                            const std::string& group, const std::string& caller) {
    ctx->saved_data["group"] = group;
    ctx->saved_data["caller"] = caller;
    at::Tensor sum = tensor.clone(at::MemoryFormat::Contiguous);
    all_reduce_sum_(sum, group, caller);
    return sum;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    return {SumOverRanks::apply(grads[0], ctx->saved_data["group"].toStringRef(),
                                ctx->saved_data["caller"].toStringRef()),
            at::Tensor(), at::Tensor()};
  }
};

at::Tensor sum_over_ranks(const at::Tensor& tensor, const SyncBatchNormCall& call) {
  return call.group ? SumOverRanks::apply(tensor, *call.group, call.caller) : tensor;
}

/// Returns one number per channel in a shape that broadcasts with `input`.
at::Tensor by_channel(const at::Tensor& vector, const at::Tensor& input) {
  std::vector<std::int64_t> shape(static_cast<std::size_t>(input.dim()), 1);
  shape[1] = -1;
  return vector.view(shape);
}

}  // namespace

// Reduces the mean first, so that the squares are taken about the mean.
at::Tensor composite_batch_norm(const std::vector<at::Tensor>& inputs,
                                const SyncBatchNormCall& call) {
  const at::Tensor &input = inputs[0], &weight = inputs[1], &bias = inputs[2];
  const at::Tensor& residual = inputs[3];
  const auto dtype = input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor x = input.to(dtype);
  std::vector<std::int64_t> others;
  for (std::int64_t d = 0; d < x.dim(); ++d) {
    if (d != 1) others.push_back(d);
  }
  at::Tensor mean;
  at::Tensor var;
  if (call.batch_statistics) {
    const std::int64_t elements = x.numel() / x.size(1);
    const at::Tensor own = at::full({1}, static_cast<double>(elements), x.options());
    const at::Tensor count = sum_over_ranks(own, call).clamp_min(1);
    mean = sum_over_ranks(x.sum(others), call) / count;
    var = sum_over_ranks((x - by_channel(mean, x)).square().sum(others), call) / count;
  } else {
    mean = call.running_mean->to(dtype);
    var = call.running_var->to(dtype);
  }
  at::Tensor y = (x - by_channel(mean, x)) * by_channel((var + call.eps).rsqrt(), x);
  if (weight.defined()) y = y * by_channel(weight.to(dtype), x);
  if (bias.defined()) y = y + by_channel(bias.to(dtype), x);
  if (residual.defined()) y = y + residual.to(dtype);
  if (call.relu) y = y.relu();
  return y.to(input.scalar_type());
}

}  // namespace torchfuse::ops
