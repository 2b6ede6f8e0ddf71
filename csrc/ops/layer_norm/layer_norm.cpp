// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/layer_norm.h"

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>
#include <torchfuse/layer_norm.h>

#include "ops/launch/huge_pages.h"
#include "ops/matrix.h"
#include "ops/registration.h"

namespace torchfuse {

namespace {

using OptionalTensor = std::optional<at::Tensor>;

constexpr const char* kLayerNormForward = "layer_norm_forward";

using ForwardResults = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

/// Returns uninitialized output, mean and rstd. RMS normalization has no mean. Sizes may be
/// symbolic.
ForwardResults empty_forward_results(const at::Tensor& input, std::int64_t normalized_dims,
                                     bool rms, std::optional<at::ScalarType> dtype) {
  const auto leading =
      input.sym_sizes().slice(0, static_cast<std::size_t>(input.dim() - normalized_dims));
  const auto statistics = input.options().dtype(ops::compute_type(input.scalar_type()));
  return {at::empty_symint(input.sym_sizes(), input.options().dtype(ops::output_type(
                                                  kLayerNormForward, input.scalar_type(), dtype))),
          rms ? at::empty({0}, statistics) : at::empty_symint(leading, statistics),
          at::empty_symint(leading, statistics)};
}

void run_forward(const ops::MatrixInput& source, kernels::LayerNormArgs& args) {
  if (!source.device().is_cpu()) {
    return ops::launch_over_rows<kernels::layer_norm_cuda>(kLayerNormForward, source, args);
  }
  const std::int64_t padded = kernels::padded_columns(source.columns());
  const at::Tensor terms = at::empty({kernels::kLayerNormTerms * padded}, source.compute_options());
  args.terms = terms.mutable_data_ptr();
  kernels::layer_norm_terms_cpu(args);
  ops::parallel_over_rows(source, kernels::layer_norm_cpu, args);
}

ForwardResults layer_norm_forward_impl(const at::Tensor& input, std::int64_t normalized_dims,
                                       const OptionalTensor& weight, const OptionalTensor& bias,
                                       double eps, bool rms, std::optional<at::ScalarType> dtype) {
  const ops::MatrixInput source(kLayerNormForward, "input", input, normalized_dims);
  const c10::OptionalDeviceGuard guard(source.device());
  at::Tensor weight_holder;
  at::Tensor bias_holder;
  kernels::LayerNormArgs args;
  args.weight = source.columns_input("weight", weight, weight_holder);
  args.bias = source.columns_input("bias", bias, bias_holder);
  const ForwardResults results =
      empty_forward_results(source.tensor(), normalized_dims, rms, dtype);
  const auto& [output, mean, rstd] = results;
  args.shape.rows = source.rows();
  args.shape.columns = source.columns();
  args.shape.rms = rms;
  args.shape.input = ops::dtype_of({kLayerNormForward, "input"}, source.tensor());
  args.shape.output = ops::dtype_of({kLayerNormForward, "output"}, output);
  if (source.is_empty()) {
    // Rows without columns have no moments.
    mean.zero_();
    rstd.zero_();
    return results;
  }
  ops::request_huge_pages(output);
  args.input = source.tensor().const_data_ptr();
  args.eps = eps;
  args.output = output.mutable_data_ptr();
  args.mean = mean.mutable_data_ptr();
  args.rstd = rstd.mutable_data_ptr();
  run_forward(source, args);
  return results;
}

ForwardResults layer_norm_forward_meta(const at::Tensor& input, std::int64_t normalized_dims,
                                       const OptionalTensor& /*weight*/,
                                       const OptionalTensor& /*bias*/, double /*eps*/, bool rms,
                                       std::optional<at::ScalarType> dtype) {
  ops::check_normalized_dims(kLayerNormForward, input, normalized_dims);
  return empty_forward_results(input, normalized_dims, rms, dtype);
}

}  // namespace

ForwardResults layer_norm_forward(const at::Tensor& input, std::int64_t normalized_dims,
                                  const OptionalTensor& weight, const OptionalTensor& bias,
                                  double eps, bool rms, std::optional<at::ScalarType> dtype) {
  return ops::call_op<layer_norm_forward>("torchfuse::layer_norm_forward", input, normalized_dims,
                                          weight, bias, eps, rms, dtype);
}

TORCH_LIBRARY_FRAGMENT(torchfuse, m) {
  ops::register_op<layer_norm_forward_impl, layer_norm_forward_meta>(m, "layer_norm_forward");
}

}  // namespace torchfuse
