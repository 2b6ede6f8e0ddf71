// SPDX-License-Identifier: BSD-3-Clause
// Cross entropy with autograd.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>
#include <torchfuse/softmax_cross_entropy.h>

#include <limits>

#include "ops/registration.h"

namespace torchfuse {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class SoftmaxCrossEntropy : public torch::autograd::Function<SoftmaxCrossEntropy> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& logits,
                            const at::Tensor& labels, double smoothing,
                            std::optional<std::int64_t> ignore_index,
                            std::optional<at::ScalarType> dtype) {
    const auto [losses, log_sum_exp, rest] =
        softmax_cross_entropy_forward(logits, labels, smoothing, ignore_index, dtype);
    ctx->save_for_backward({logits, labels, log_sum_exp, rest});
    ctx->saved_data["smoothing"] = smoothing;
    ctx->saved_data["ignore_index"] = ignore_index;
    return losses;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const variable_list saved = ctx->get_saved_variables();
    const double smoothing = ctx->saved_data["smoothing"].toDouble();
    const auto ignore_index = ctx->saved_data["ignore_index"].toOptional<std::int64_t>();
    const at::Tensor grad =
        at::GradMode::is_enabled()
            ? differentiable(grads[0], saved[0], saved[1], smoothing, ignore_index)
            : softmax_cross_entropy_backward(grads[0], saved[0], saved[2], saved[1], smoothing,
                                             ignore_index, saved[3]);
    return {grad, at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }

 private:
  /// Computes a gradient that can be differentiated again, with torch's operators.
  static at::Tensor differentiable(const at::Tensor& grad_losses, const at::Tensor& logits,
                                   const at::Tensor& labels, double smoothing,
                                   std::optional<std::int64_t> ignore_index) {
    const auto compute = logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const at::Tensor unknown = labels.lt(0).logical_or(labels.ge(logits.size(1)));
    const at::Tensor index = labels.masked_fill(unknown, 0);
    const at::Tensor softmax = at::softmax(logits.to(compute), 1);
    const at::Tensor target =
        at::full_like(softmax, smoothing / static_cast<double>(logits.size(1)))
            .scatter_add(1, index.unsqueeze(1),
                         at::full({labels.size(0), 1}, 1.0 - smoothing, softmax.options()));
    at::Tensor grad = (softmax - target) * grad_losses.to(compute).unsqueeze(1);
    grad = grad.masked_fill(unknown.unsqueeze(1), std::numeric_limits<double>::quiet_NaN());
    if (ignore_index) grad = grad.masked_fill(labels.eq(*ignore_index).unsqueeze(1), 0);
    return grad.to(logits.scalar_type());
  }
};

at::Tensor softmax_cross_entropy_impl(const at::Tensor& logits, const at::Tensor& labels,
                                      double smoothing, std::optional<std::int64_t> ignore_index,
                                      std::optional<at::ScalarType> dtype) {
  // Return fp32 losses under autocast, as torch does. A scaled gradient of 16-bit losses would
  // overflow.
  const bool narrow = logits.scalar_type() == at::kHalf || logits.scalar_type() == at::kBFloat16;
  const c10::DeviceType device = logits.device().type();
  if (!dtype && narrow && at::autocast::is_autocast_available(device) &&
      at::autocast::is_autocast_enabled(device)) {
    dtype = at::kFloat;
  }
  return SoftmaxCrossEntropy::apply(logits, labels, smoothing, ignore_index, dtype);
}

}  // namespace

at::Tensor softmax_cross_entropy(const at::Tensor& logits, const at::Tensor& labels,
                                 double smoothing, std::optional<std::int64_t> ignore_index,
                                 std::optional<at::ScalarType> dtype) {
  return ops::call_op<softmax_cross_entropy>("torchfuse::softmax_cross_entropy", logits, labels,
                                             smoothing, ignore_index, dtype);
}

TORCH_LIBRARY_IMPL(torchfuse, CompositeImplicitAutograd, m) {
  m.impl("softmax_cross_entropy", softmax_cross_entropy_impl);
}

}  // namespace torchfuse
