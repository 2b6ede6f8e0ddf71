// SPDX-License-Identifier: BSD-3-Clause
// Batch normalization over the ranks of a process group, with autograd: one collective each way.
#include <ATen/Functions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>
#include <torchfuse/batch_norm.h>
#include <torchfuse/collectives.h>

#include <array>

#include "ops/autograd.h"
#include "ops/batch_norm/sync_batch_norm.h"
#include "ops/check.h"
#include "ops/registration.h"

namespace torchfuse {

namespace {

using ops::SyncBatchNormCall;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<at::Tensor>;
using GradsWanted = std::array<bool, 4>;  // of input, weight, bias and residual

at::Tensor value_of(const OptionalTensor& tensor) { return tensor.value_or(at::Tensor()); }

/// Checks the arguments before any communication, because a rank that fails alone leaves the others
/// waiting. Sizes may be symbolic, and tensors may have no memory.
void check_call(const at::Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                const OptionalTensor& residual, const SyncBatchNormCall& call) {
  const char* caller = call.caller.c_str();
  const ops::Argument argument{caller, "input"};
  if (input.dim() < 2 || input.sym_size(1) == 0) {
    ops::fail(argument, "have at least 2 dimensions and one channel", c10::str(input.sym_sizes()));
  }
  ops::dtype_of(argument, input);
  const auto check_device = [&](const char* name, const at::Tensor& tensor) {
    ops::check_same_device({caller, name}, tensor, input.device(), "input", ops::kMoveTheModule);
  };
  const auto check_vector = [&](const char* name, const OptionalTensor& vector) {
    if (!vector) return;
    check_device(name, *vector);
    if (vector->dim() == 1 && vector->sym_size(0) == input.sym_size(1)) return;
    ops::fail({caller, name},
              c10::str("be of shape [", input.sym_size(1), "], the channels of input"),
              c10::str(vector->sym_sizes()), "num_features must be input.size(1).");
  };
  check_vector("weight", weight);
  check_vector("bias", bias);
  check_vector("running_mean", call.running_mean);
  check_vector("running_var", call.running_var);
  if (!residual) return;
  check_device("residual", *residual);
  if (residual->sym_sizes() != input.sym_sizes()) {
    ops::fail({caller, "residual"}, c10::str("have the sizes of input, ", input.sym_sizes()),
              c10::str(residual->sym_sizes()));
  }
  if (residual->scalar_type() != input.scalar_type()) {
    ops::fail({caller, "residual"}, c10::str("be of the dtype of input, ", input.scalar_type()),
              c10::str(residual->scalar_type()), "Convert it with to(input.dtype).");
  }
}

/// Returns the moments for the normalization: none in evaluation, the given moments in a repeated
/// forward pass, otherwise all ranks' moments.
OptionalTensor reduced_moments(const at::Tensor& input, const SyncBatchNormCall& call) {
  if (!call.batch_statistics) return std::nullopt;
  if (call.packed) return call.packed;
  at::Tensor packed = batch_norm_stats(input);
  if (call.group) all_reduce_sum_(packed, *call.group, call.caller, call.deterministic);
  return packed;
}

class SyncBatchNorm : public torch::autograd::Function<SyncBatchNorm> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& input,
                               const OptionalTensor& weight, const OptionalTensor& bias,
                               const OptionalTensor& residual, const SyncBatchNormCall& call) {
    const OptionalTensor packed = reduced_moments(input, call);
    // A repeated forward pass must not update the running statistics again.
    const bool observe = !call.packed || !call.batch_statistics;
    const auto [output, saved] =
        batch_norm_elemt(input, weight, bias, packed, observe ? call.running_mean : std::nullopt,
                         observe ? call.running_var : std::nullopt,
                         observe ? call.num_batches_tracked : std::nullopt, residual, call.momentum,
                         call.eps, call.relu);
    // With a residual, the ReLU's gate cannot be computed from the input alone.
    const bool gate_is_output = call.relu && residual.has_value();
    ctx->save_for_backward({input, value_of(weight), value_of(bias), value_of(residual), saved,
                            gate_is_output ? output : at::Tensor(),
                            call.batch_statistics ? at::Tensor() : *call.running_mean,
                            call.batch_statistics ? at::Tensor() : *call.running_var});
    ctx->saved_data["group"] = call.group;
    ctx->saved_data["caller"] = call.caller;
    ctx->saved_data["deterministic"] = call.deterministic;
    ctx->saved_data["batch_statistics"] = call.batch_statistics;
    ctx->saved_data["eps"] = call.eps;
    ctx->saved_data["relu"] = call.relu;
    const at::Tensor returned = packed ? *packed : at::empty({0}, saved.options());
    ctx->mark_non_differentiable({returned});
    return {output, returned};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const variable_list saved = ctx->get_saved_variables();
    SyncBatchNormCall call;
    const auto group = ctx->saved_data["group"];
    if (!group.isNone()) call.group = group.toStringRef();
    call.caller = ctx->saved_data["caller"].toStringRef();
    call.deterministic = ctx->saved_data["deterministic"].toBool();
    call.batch_statistics = ctx->saved_data["batch_statistics"].toBool();
    call.eps = ctx->saved_data["eps"].toDouble();
    call.relu = ctx->saved_data["relu"].toBool();
    call.running_mean = ops::optional_of(saved[6]);
    call.running_var = ops::optional_of(saved[7]);
    const GradsWanted wanted = ops::wanted_grads<4>(*ctx, saved);
    if (at::GradMode::is_enabled()) {
      return ops::differentiable_grads(ops::composite_batch_norm(saved, call), saved, wanted,
                                       grads[0]);
    }
    return fused_grads(saved, grads[0], wanted, call);
  }

 private:
  static variable_list fused_grads(const variable_list& saved, const at::Tensor& grad_output,
                                   const GradsWanted& wanted, const SyncBatchNormCall& call) {
    const at::Tensor& input = saved[0];
    const OptionalTensor weight = ops::optional_of(saved[1]);
    const OptionalTensor bias = ops::optional_of(saved[2]);
    const OptionalTensor gate = ops::optional_of(saved[5]);
    auto [sums, grad_weight, grad_bias, behind_relu] =
        batch_norm_backward_reduce(grad_output, input, saved[4], weight, bias, gate, call.relu);
    const at::Tensor& grad = gate ? behind_relu : grad_output;
    variable_list result(5);
    if (wanted[1]) result[1] = grad_weight;
    if (wanted[2]) result[2] = grad_bias;
    if (wanted[3]) result[3] = grad;
    // Every rank takes part, even if the input needs no gradient, because the other ranks wait.
    if (call.group && call.batch_statistics) {
      all_reduce_sum_(sums, *call.group, call.caller, call.deterministic);
    }
    if (wanted[0]) {
      result[0] =
          batch_norm_backward_elemt(grad, input, saved[4], sums, weight, bias, call.relu && !gate);
    }
    return result;
  }
};

std::tuple<at::Tensor, at::Tensor> sync_batch_norm_impl(
    const at::Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
    const OptionalTensor& running_mean, const OptionalTensor& running_var,
    const OptionalTensor& num_batches_tracked, const OptionalTensor& residual,
    const OptionalTensor& packed, bool training, std::optional<double> momentum, double eps,
    bool relu, std::optional<c10::string_view> group, c10::string_view caller, bool deterministic) {
  SyncBatchNormCall call;
  call.running_mean = running_mean;
  call.running_var = running_var;
  call.num_batches_tracked = num_batches_tracked;
  call.packed = packed;
  call.batch_statistics = training || !running_mean || !running_var;
  call.momentum = momentum;
  call.eps = eps;
  call.relu = relu;
  if (group) call.group = std::string(*group);
  call.caller = std::string(caller);
  call.deterministic = deterministic;
  check_call(input, weight, bias, residual, call);
  const variable_list result = SyncBatchNorm::apply(input, weight, bias, residual, call);
  return {result[0], result[1]};
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> sync_batch_norm(
    const at::Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
    const OptionalTensor& running_mean, const OptionalTensor& running_var,
    const OptionalTensor& num_batches_tracked, const OptionalTensor& residual,
    const OptionalTensor& packed, bool training, std::optional<double> momentum, double eps,
    bool relu, const std::optional<std::string>& group, const std::string& caller,
    bool deterministic) {
  std::optional<c10::string_view> group_name;
  if (group) group_name = *group;
  return ops::call_op<sync_batch_norm_impl>("torchfuse::sync_batch_norm", input, weight, bias,
                                            running_mean, running_var, num_batches_tracked,
                                            residual, packed, training, momentum, eps, relu,
                                            group_name, caller, deterministic);
}

TORCH_LIBRARY_IMPL(torchfuse, CompositeImplicitAutograd, m) {
  m.impl("sync_batch_norm", sync_batch_norm_impl);
}

}  // namespace torchfuse
