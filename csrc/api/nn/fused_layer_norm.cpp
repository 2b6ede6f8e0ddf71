// SPDX-License-Identifier: BSD-3-Clause
#include <torchfuse/nn/fused_layer_norm.h>

#include <ATen/Functions.h>
#include <c10/util/Exception.h>
#include <torch/utils.h>

#include <algorithm>
#include <optional>

#include <torchfuse/layer_norm.h>

namespace torchfuse::nn {

namespace {

std::optional<at::Tensor> if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

void fill(const at::Tensor& parameter, double value) {
  if (!parameter.defined()) return;
  const torch::NoGradGuard no_grad;
  parameter.fill_(value);
}

}  // namespace

FusedNormalization::FusedNormalization(const char* name, FusedLayerNormOptions options_)
    : options(std::move(options_)), name_(name) {
  const auto& shape = options.normalized_shape();
  TORCH_CHECK(
      !shape.empty() &&
          std::all_of(shape.begin(), shape.end(), [](std::int64_t size) { return size >= 0; }),
      name_, ": expected normalized_shape to have at least one size, and none below 0, got ",
      at::IntArrayRef(shape), ".");
}

at::Tensor FusedNormalization::empty_parameter() const {
  return options.elementwise_affine() ? at::empty(options.normalized_shape()) : at::Tensor();
}

at::Tensor FusedNormalization::normalize(const at::Tensor& input, const at::Tensor& bias,
                                         bool rms) const {
  const at::IntArrayRef shape = options.normalized_shape();
  TORCH_CHECK(input.defined(), name_, ": expected input to be a tensor, got none.");
  const bool fits =
      static_cast<std::size_t>(input.dim()) >= shape.size() &&
      input.sizes().slice(static_cast<std::size_t>(input.dim()) - shape.size()) == shape;
  TORCH_CHECK(fits, name_, ": expected input to end in the dimensions normalized_shape = ", shape,
              ", got an input of shape ", input.sizes(), ".");
  return layer_norm(input, static_cast<std::int64_t>(shape.size()), if_defined(weight),
                    if_defined(bias), options.eps(), rms, std::nullopt, options.memory_efficient(),
                    name_);
}

void FusedNormalization::print(std::ostream& stream) const {
  stream << std::boolalpha << "torchfuse::nn::" << name_ << "("
         << at::IntArrayRef(options.normalized_shape()) << ", eps=" << options.eps()
         << ", elementwise_affine=" << options.elementwise_affine()
         << ", memory_efficient=" << options.memory_efficient() << ")";
}

FusedLayerNormImpl::FusedLayerNormImpl(FusedLayerNormOptions options_)
    : FusedNormalization("FusedLayerNorm", std::move(options_)) {
  FusedLayerNormImpl::reset();
}

void FusedLayerNormImpl::reset() {
  weight = register_parameter("weight", empty_parameter(), options.elementwise_affine());
  const bool has_bias = options.elementwise_affine() && options.bias();
  bias = register_parameter("bias", has_bias ? empty_parameter() : at::Tensor(), has_bias);
  reset_parameters();
}

void FusedLayerNormImpl::reset_parameters() {
  fill(weight, 1.0);
  fill(bias, 0.0);
}

at::Tensor FusedLayerNormImpl::forward(const at::Tensor& input) {
  return normalize(input, bias, /*rms=*/false);
}

FusedRMSNormImpl::FusedRMSNormImpl(FusedLayerNormOptions options_)
    : FusedNormalization("FusedRMSNorm", std::move(options_)) {
  FusedRMSNormImpl::reset();
}

void FusedRMSNormImpl::reset() {
  weight = register_parameter("weight", empty_parameter(), options.elementwise_affine());
  reset_parameters();
}

void FusedRMSNormImpl::reset_parameters() { fill(weight, 1.0); }

at::Tensor FusedRMSNormImpl::forward(const at::Tensor& input) {
  return normalize(input, at::Tensor(), /*rms=*/true);
}

}  // namespace torchfuse::nn
