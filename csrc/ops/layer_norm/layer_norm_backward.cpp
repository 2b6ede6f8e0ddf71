// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/layer_norm_backward.h"

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>
#include <torchfuse/layer_norm.h>

#include <algorithm>

#include "ops/launch/huge_pages.h"
#include "ops/matrix.h"
#include "ops/registration.h"

namespace torchfuse {

namespace {

using OptionalTensor = std::optional<at::Tensor>;
using OutputMask = std::array<bool, 3>;
using BackwardResults = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

constexpr const char* kLayerNormBackward = "layer_norm_backward";

/// Returns uninitialized gradients; unwanted gradients are undefined. `dtype` is the input's dtype,
/// by default the source's.
BackwardResults empty_backward_results(const at::Tensor& source, const OptionalTensor& weight,
                                       const OptionalTensor& bias,
                                       std::optional<at::ScalarType> dtype,
                                       const OutputMask& mask) {
  const auto contiguous = at::MemoryFormat::Contiguous;
  BackwardResults results;
  if (mask[0]) {
    std::get<0>(results) = at::empty_symint(
        source.sym_sizes(), source.options().dtype(dtype.value_or(source.scalar_type())));
  }
  if (mask[1] && weight) std::get<1>(results) = at::empty_like(*weight, {}, contiguous);
  if (mask[2] && bias) std::get<2>(results) = at::empty_like(*bias, {}, contiguous);
  return results;
}

kernels::ChannelOutput layer_norm_columns_output(const char* name, const at::Tensor& vector) {
  if (!vector.defined()) return {};
  return {vector.mutable_data_ptr(), ops::dtype_of({kLayerNormBackward, name}, vector)};
}

/// Checks and describes the source, from which x_hat is computed, and the output's gradient. Both
/// have one layout.
kernels::LayerNormShape backward_shape(const ops::MatrixInput& grad, const ops::MatrixInput& source,
                                       bool from_output, bool rms, at::ScalarType input) {
  const at::ScalarType output = grad.tensor().scalar_type();
  ops::check_same_device({kLayerNormBackward, "source"}, source.tensor(), grad.device(),
                         "grad_output");
  ops::check_same_sizes({kLayerNormBackward, "source"}, source.tensor(), grad.tensor(),
                        "grad_output");
  ops::output_type(kLayerNormBackward, input, output);
  const at::ScalarType expected = from_output ? output : input;
  if (source.tensor().scalar_type() != expected) {
    ops::fail({kLayerNormBackward, "source"}, c10::str("be of dtype ", expected),
              c10::str(source.tensor().scalar_type()));
  }
  kernels::LayerNormShape shape;
  shape.rows = source.rows();
  shape.columns = source.columns();
  shape.rms = rms;
  shape.input = ops::dtype_of({kLayerNormBackward, "source"}, at::empty({0}, input));
  shape.output = ops::dtype_of({kLayerNormBackward, "grad_output"}, grad.tensor());
  return shape;
}

void run_backward(const ops::MatrixInput& source, kernels::LayerNormBackwardArgs& args) {
  const bool sums = args.grad_weight.data != nullptr || args.grad_bias.data != nullptr;
  const std::int64_t count = source.device().is_cpu()
                                 ? kernels::layer_norm_partials(args.shape)
                                 : kernels::layer_norm_partials_cuda(args.shape);
  const at::Tensor partials = at::empty({sums ? count : 0}, source.compute_options());
  args.partials = sums ? partials.mutable_data_ptr() : nullptr;
  if (!source.device().is_cpu()) {
    return ops::launch_over_rows<kernels::layer_norm_backward_cuda>(kLayerNormBackward, source,
                                                                    args);
  }
  const std::int64_t padded = kernels::padded_columns(source.columns());
  const at::Tensor terms =
      at::empty({kernels::kLayerNormBackwardTerms * padded}, source.compute_options());
  args.terms = terms.mutable_data_ptr();
  kernels::layer_norm_backward_terms_cpu(args);
  const std::int64_t items = kernels::layer_norm_items(args.shape);
  const std::int64_t grain =
      std::max<std::int64_t>(ops::rows_grain(source.columns()) / kernels::kLayerNormItemRows, 1);
  const kernels::CpuIsa isa = ops::current_cpu_isa();
  at::parallel_for(0, items, grain, [&](std::int64_t begin, std::int64_t end) {
    kernels::layer_norm_backward_cpu(isa, args, begin, end);
  });
  if (!sums) return;
  const std::int64_t columns_grain = std::max<std::int64_t>(ops::kGrainSize / (2 * items), 64);
  at::parallel_for(0, source.columns(), columns_grain, [&](std::int64_t begin, std::int64_t end) {
    kernels::layer_norm_backward_sum_cpu(args, begin, end);
  });
}

BackwardResults layer_norm_backward_impl(const at::Tensor& grad_output,
                                         const at::Tensor& source_tensor,
                                         std::int64_t normalized_dims, const OptionalTensor& mean,
                                         const at::Tensor& rstd, const OptionalTensor& weight,
                                         const OptionalTensor& bias, bool rms, bool from_output,
                                         std::optional<at::ScalarType> dtype, OutputMask mask) {
  const ops::MatrixInput grad(kLayerNormBackward, "grad_output", grad_output, normalized_dims);
  const ops::MatrixInput source(kLayerNormBackward, "source", source_tensor, normalized_dims);
  const c10::OptionalDeviceGuard guard(source.device());
  kernels::LayerNormBackwardArgs args;
  args.shape =
      backward_shape(grad, source, from_output, rms, dtype.value_or(source.tensor().scalar_type()));
  at::Tensor weight_holder;
  at::Tensor bias_holder;
  args.weight = source.columns_input("weight", weight, weight_holder);
  args.bias = source.columns_input("bias", bias, bias_holder);
  if (!rms && !from_output) {
    if (!mean)
      ops::fail({kLayerNormBackward, "mean"}, "be a tensor unless rms or from_output is set",
                "none");
    args.mean = source.statistics("mean", *mean);
  }
  args.rstd = source.statistics("rstd", rstd);
  const BackwardResults results =
      empty_backward_results(source.tensor(), weight, bias, dtype, mask);
  const auto& [grad_input, grad_weight, grad_bias] = results;
  if (source.is_empty()) {
    if (grad_weight.defined()) grad_weight.zero_();
    if (grad_bias.defined()) grad_bias.zero_();
    return results;
  }
  args.grad_output = grad.tensor().const_data_ptr();
  args.source = source.tensor().const_data_ptr();
  args.from_output = from_output;
  args.grad_weight = layer_norm_columns_output("grad_weight", grad_weight);
  args.grad_bias = layer_norm_columns_output("grad_bias", grad_bias);
  if (grad_input.defined()) {
    ops::request_huge_pages(grad_input);
    args.grad_input = grad_input.mutable_data_ptr();
  }
  run_backward(source, args);
  return results;
}

BackwardResults layer_norm_backward_meta(const at::Tensor& /*grad_output*/,
                                         const at::Tensor& source, std::int64_t normalized_dims,
                                         const OptionalTensor& /*mean*/, const at::Tensor& /*rstd*/,
                                         const OptionalTensor& weight, const OptionalTensor& bias,
                                         bool /*rms*/, bool /*from_output*/,
                                         std::optional<at::ScalarType> dtype, OutputMask mask) {
  ops::check_normalized_dims(kLayerNormBackward, source, normalized_dims);
  return empty_backward_results(source, weight, bias, dtype, mask);
}

}  // namespace

BackwardResults layer_norm_backward(const at::Tensor& grad_output, const at::Tensor& source,
                                    std::int64_t normalized_dims, const OptionalTensor& mean,
                                    const at::Tensor& rstd, const OptionalTensor& weight,
                                    const OptionalTensor& bias, bool rms, bool from_output,
                                    std::optional<at::ScalarType> dtype,
                                    std::array<bool, 3> output_mask) {
  return ops::call_op<layer_norm_backward>("torchfuse::layer_norm_backward", grad_output, source,
                                           normalized_dims, mean, rstd, weight, bias, rms,
                                           from_output, dtype, output_mask);
}

TORCH_LIBRARY_FRAGMENT(torchfuse, m) {
  ops::register_op<layer_norm_backward_impl, layer_norm_backward_meta>(m, "layer_norm_backward");
}

}  // namespace torchfuse
