// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/softmax_cross_entropy.h"

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/StringUtil.h>
#include <torch/library.h>
#include <torchfuse/softmax_cross_entropy.h>

#include "ops/launch/huge_pages.h"
#include "ops/matrix.h"
#include "ops/registration.h"

namespace torchfuse {

namespace {

using Losses = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

constexpr const char* kEntropyForward = "softmax_cross_entropy_forward";
constexpr const char* kEntropyBackward = "softmax_cross_entropy_backward";

void check_smoothing(const char* op, double smoothing) {
  if (smoothing >= 0.0 && smoothing <= 1.0) return;
  ops::fail({op, "smoothing"}, "be from 0 to 1", c10::str(smoothing));
}

/// Checks that every label is a class or ignored. Used only on the CPU, where the check is cheap
/// compared with reading the logits.
void check_label_values(const char* op, const at::Tensor& labels, std::int64_t classes,
                        std::optional<std::int64_t> ignored) {
  const auto* values = labels.const_data_ptr<std::int64_t>();
  for (std::int64_t row = 0; row < labels.numel(); ++row) {
    if ((values[row] >= 0 && values[row] < classes) || values[row] == ignored) continue;
    ops::fail({op, "labels", row}, c10::str("be from 0 to ", classes - 1, ", or ignore_index"),
              c10::str(values[row]));
  }
}

/// A call's logits and labels, readable by the kernels.
struct Problem {
  ops::MatrixInput logits;
  at::Tensor labels;
  kernels::CrossEntropyShape shape;
  kernels::CrossEntropyLabels kernel_labels;

  Problem(const char* op, const at::Tensor& logits_, const at::Tensor& labels_, double smoothing,
          std::optional<std::int64_t> ignored)
      : logits(op, "logits", two_dimensional(op, logits_), 1) {
    check_smoothing(op, smoothing);
    const ops::Argument argument{op, "labels"};
    ops::check_same_device(argument, labels_, logits.device(), "logits");
    if (labels_.scalar_type() != at::kLong || labels_.dim() != 1 ||
        labels_.size(0) != logits.rows()) {
      ops::fail(argument, c10::str("be an int64 tensor of shape [", logits.rows(), "]"),
                c10::str(labels_.scalar_type(), " of shape ", labels_.sizes()));
    }
    labels = labels_.contiguous();
    if (labels.is_cpu()) check_label_values(op, labels, logits.columns(), ignored);
    shape.rows = logits.rows();
    shape.classes = logits.columns();
    shape.logits = ops::dtype_of({op, "logits"}, logits.tensor());
    kernel_labels.labels = labels.const_data_ptr<std::int64_t>();
    kernel_labels.ignores = ignored.has_value();
    kernel_labels.ignored = ignored.value_or(0);
  }

  static const at::Tensor& two_dimensional(const char* op, const at::Tensor& tensor) {
    if (tensor.dim() == 2 && (tensor.size(1) > 0 || tensor.size(0) == 0)) return tensor;
    ops::fail({op, "logits"}, "be of shape [N, C] with at least one class",
              c10::str(tensor.sizes()), "Flatten other dimensions into N.");
  }
};

Losses empty_losses(const at::Tensor& logits, std::optional<at::ScalarType> dtype) {
  const at::ScalarType own = logits.scalar_type();
  const auto of_rows = [&](at::ScalarType type) {
    return at::empty_symint({logits.sym_size(0)}, logits.options().dtype(type));
  };
  const at::ScalarType compute = ops::compute_type(own);
  return {of_rows(ops::output_type(kEntropyForward, own, dtype)), of_rows(compute),
          of_rows(compute)};
}

Losses entropy_forward_impl(const at::Tensor& logits, const at::Tensor& labels, double smoothing,
                            std::optional<std::int64_t> ignore_index,
                            std::optional<at::ScalarType> dtype) {
  const Problem problem(kEntropyForward, logits, labels, smoothing, ignore_index);
  const c10::OptionalDeviceGuard guard(logits.device());
  Losses result = empty_losses(logits, dtype);
  const auto& [losses, log_sum_exp, rest] = result;
  if (problem.shape.rows == 0) return result;
  kernels::CrossEntropyArgs args;
  args.shape = problem.shape;
  args.logits = problem.logits.tensor().const_data_ptr();
  args.labels = problem.kernel_labels;
  args.smoothing = smoothing;
  args.losses = {losses.mutable_data_ptr(), ops::dtype_of({kEntropyForward, "losses"}, losses)};
  args.log_sum_exp = log_sum_exp.mutable_data_ptr();
  args.rest = rest.mutable_data_ptr();
  if (logits.is_cpu()) {
    ops::parallel_over_rows(problem.logits, kernels::softmax_cross_entropy_cpu, args);
  } else {
    ops::launch_over_rows<kernels::softmax_cross_entropy_cuda>(kEntropyForward, problem.logits,
                                                               args);
  }
  return result;
}

at::Tensor entropy_backward_impl(const at::Tensor& grad_losses, const at::Tensor& logits,
                                 const at::Tensor& log_sum_exp, const at::Tensor& labels,
                                 double smoothing, std::optional<std::int64_t> ignore_index,
                                 const std::optional<at::Tensor>& rest) {
  const Problem problem(kEntropyBackward, logits, labels, smoothing, ignore_index);
  const c10::OptionalDeviceGuard guard(logits.device());
  const ops::Argument argument{kEntropyBackward, "grad_losses"};
  ops::check_tensor(argument, grad_losses);
  ops::check_same_sizes(argument, grad_losses, problem.labels, "labels");
  ops::check_same_device(argument, grad_losses, logits.device(), "logits");
  const at::Tensor grads = grad_losses.resolve_neg().contiguous();
  const at::Tensor result = at::empty(logits.sizes(), logits.options());
  kernels::CrossEntropyBackwardArgs args;
  args.shape = problem.shape;
  args.logits = problem.logits.tensor().const_data_ptr();
  args.labels = problem.kernel_labels;
  args.smoothing = smoothing;
  args.grad_losses = {grads.const_data_ptr(), ops::dtype_of(argument, grads)};
  args.log_sum_exp = problem.logits.statistics("log_sum_exp", log_sum_exp);
  if (rest) args.rest = problem.logits.statistics("rest", *rest);
  if (problem.shape.rows == 0) return result;
  ops::request_huge_pages(result);
  args.grad_logits = result.mutable_data_ptr();
  if (logits.is_cpu()) {
    ops::parallel_over_rows(problem.logits, kernels::softmax_cross_entropy_backward_cpu, args);
  } else {
    ops::launch_over_rows<kernels::softmax_cross_entropy_backward_cuda>(kEntropyBackward,
                                                                        problem.logits, args);
  }
  return result;
}

Losses entropy_forward_meta(const at::Tensor& logits, const at::Tensor& /*labels*/,
                            double smoothing, std::optional<std::int64_t> /*ignore_index*/,
                            std::optional<at::ScalarType> dtype) {
  check_smoothing(kEntropyForward, smoothing);
  return empty_losses(logits, dtype);
}

at::Tensor entropy_backward_meta(const at::Tensor& /*grad_losses*/, const at::Tensor& logits,
                                 const at::Tensor& /*log_sum_exp*/, const at::Tensor& /*labels*/,
                                 double /*smoothing*/, std::optional<std::int64_t> /*ignore_index*/,
                                 const std::optional<at::Tensor>& /*rest*/) {
  return at::empty_symint(logits.sym_sizes(), logits.options());
}

}  // namespace

Losses softmax_cross_entropy_forward(const at::Tensor& logits, const at::Tensor& labels,
                                     double smoothing, std::optional<std::int64_t> ignore_index,
                                     std::optional<at::ScalarType> dtype) {
  return ops::call_op<softmax_cross_entropy_forward>(
      "torchfuse::softmax_cross_entropy_forward", logits, labels, smoothing, ignore_index, dtype);
}

at::Tensor softmax_cross_entropy_backward(const at::Tensor& grad_losses, const at::Tensor& logits,
                                          const at::Tensor& log_sum_exp, const at::Tensor& labels,
                                          double smoothing,
                                          std::optional<std::int64_t> ignore_index,
                                          const std::optional<at::Tensor>& rest) {
  return ops::call_op<softmax_cross_entropy_backward>("torchfuse::softmax_cross_entropy_backward",
                                                      grad_losses, logits, log_sum_exp, labels,
                                                      smoothing, ignore_index, rest);
}

TORCH_LIBRARY_FRAGMENT(torchfuse, m) {
  ops::register_op<entropy_forward_impl, entropy_forward_meta>(m, "softmax_cross_entropy_forward");
  ops::register_op<entropy_backward_impl, entropy_backward_meta>(m,
                                                                 "softmax_cross_entropy_backward");
}

}  // namespace torchfuse
