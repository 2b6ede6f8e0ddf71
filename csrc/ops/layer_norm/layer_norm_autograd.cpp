// SPDX-License-Identifier: BSD-3-Clause
// Layer and RMS normalization with autograd.
#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>
#include <torchfuse/layer_norm.h>

#include <string>

#include "ops/autograd.h"
#include "ops/matrix.h"
#include "ops/registration.h"

namespace torchfuse {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<at::Tensor>;

/// A call's arguments other than tensors.
struct LayerNormCall {
  std::int64_t normalized_dims = 1;
  double eps = 1e-5;
  bool rms = false;
  std::optional<at::ScalarType> dtype;
  bool memory_efficient = false;
  std::string caller;
};

void check_layer_norm(const at::Tensor& input, const OptionalTensor& weight,
                      const OptionalTensor& bias, const LayerNormCall& call) {
  const char* caller = call.caller.c_str();
  ops::dtype_of({caller, "input"}, input);
  ops::check_normalized_dims(caller, input, call.normalized_dims);
  ops::output_type(caller, input.scalar_type(), call.dtype);
  if (weight) ops::check_columns({caller, "weight"}, *weight, input, call.normalized_dims);
  if (bias) ops::check_columns({caller, "bias"}, *bias, input, call.normalized_dims);
}

/// Computes the layer with torch's operators.
at::Tensor composite(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                     const LayerNormCall& call) {
  const at::ScalarType compute = ops::compute_type(input.scalar_type());
  std::vector<std::int64_t> dims;
  for (std::int64_t d = 1; d <= call.normalized_dims; ++d) dims.push_back(-d);
  at::Tensor x = input.to(compute);
  if (!call.rms) x = x - x.mean(dims, /*keepdim=*/true);
  at::Tensor y = x * (x.square().mean(dims, /*keepdim=*/true) + call.eps).rsqrt();
  if (weight.defined()) y = y * weight.to(compute);
  if (bias.defined()) y = y + bias.to(compute);
  return y.to(call.dtype.value_or(input.scalar_type()));
}

class LayerNorm : public torch::autograd::Function<LayerNorm> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input,
                            const OptionalTensor& weight, const OptionalTensor& bias,
                            const LayerNormCall& call) {
    const auto [output, mean, rstd] = layer_norm_forward(input, call.normalized_dims, weight, bias,
                                                         call.eps, call.rms, call.dtype);
    const at::Tensor none;
    ctx->save_for_backward({call.memory_efficient ? output : input, weight.value_or(none),
                            bias.value_or(none), mean, rstd});
    ctx->saved_data["normalized_dims"] = call.normalized_dims;
    ctx->saved_data["eps"] = call.eps;
    ctx->saved_data["rms"] = call.rms;
    ctx->saved_data["dtype"] = call.dtype;
    ctx->saved_data["memory_efficient"] = call.memory_efficient;
    ctx->saved_data["caller"] = call.caller;
    ctx->saved_data["input_type"] = input.scalar_type();
    return output;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const variable_list saved = ctx->get_saved_variables();
    LayerNormCall call;
    call.normalized_dims = ctx->saved_data["normalized_dims"].toInt();
    call.eps = ctx->saved_data["eps"].toDouble();
    call.rms = ctx->saved_data["rms"].toBool();
    call.dtype = ctx->saved_data["dtype"].toOptional<at::ScalarType>();
    call.memory_efficient = ctx->saved_data["memory_efficient"].toBool();
    call.caller = ctx->saved_data["caller"].toStringRef();
    const at::ScalarType input_type = ctx->saved_data["input_type"].toScalarType();
    const at::Tensor grad_output = grads[0].to(call.dtype.value_or(input_type));
    const auto mask = ops::wanted_grads<3>(*ctx, saved);
    if (at::GradMode::is_enabled()) {
      TORCH_CHECK(!call.memory_efficient, call.caller,
                  ": expected memory_efficient to be false for gradients of gradients, got true. "
                  "This mode does not save the input.");
      // Evaluate the composite again, and return its gradients.
      return ops::differentiable_grads(composite(saved[0], saved[1], saved[2], call), saved, mask,
                                       grad_output);
    }
    const auto [grad_input, grad_weight, grad_bias] = layer_norm_backward(
        grad_output, saved[0], call.normalized_dims,
        call.rms ? std::nullopt : ops::optional_of(saved[3]), saved[4], ops::optional_of(saved[1]),
        ops::optional_of(saved[2]), call.rms, call.memory_efficient, input_type, mask);
    return {grad_input, grad_weight, grad_bias, at::Tensor()};
  }
};

at::Tensor layer_norm_impl(const at::Tensor& input, std::int64_t normalized_dims,
                           const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                           bool rms, std::optional<at::ScalarType> dtype, bool memory_efficient,
                           c10::string_view caller) {
  const LayerNormCall call{normalized_dims, eps, rms, dtype, memory_efficient, std::string(caller)};
  check_layer_norm(input, weight, bias, call);
  return LayerNorm::apply(input, weight, bias, call);
}

}  // namespace

at::Tensor layer_norm(const at::Tensor& input, std::int64_t normalized_dims,
                      const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                      bool rms, std::optional<at::ScalarType> dtype, bool memory_efficient,
                      const std::string& caller) {
  return ops::call_op<layer_norm_impl>("torchfuse::layer_norm", input, normalized_dims, weight,
                                       bias, eps, rms, dtype, memory_efficient, caller);
}

TORCH_LIBRARY_IMPL(torchfuse, CompositeImplicitAutograd, m) {
  m.impl("layer_norm", layer_norm_impl);
}

}  // namespace torchfuse
