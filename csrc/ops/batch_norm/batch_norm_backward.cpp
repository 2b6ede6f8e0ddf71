// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/batch_norm_backward.h"

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>
#include <torchfuse/batch_norm.h>

#include "ops/batch_norm/batch_norm_backend.h"
#include "ops/batch_norm/batch_norm_tensors.h"
#include "ops/registration.h"

namespace torchfuse {

namespace {

using OptionalTensor = std::optional<at::Tensor>;
using ReduceResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

constexpr const char* kReduce = "batch_norm_backward_reduce";
constexpr const char* kBackwardElemt = "batch_norm_backward_elemt";

/// Returns the dtype of the vector's gradient: the vector's dtype, or the compute type without a
/// vector.
at::ScalarType gradient_dtype(const at::Tensor& input, const OptionalTensor& vector) {
  if (vector && vector->defined()) return vector->scalar_type();
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

ReduceResult reduce_impl(const at::Tensor& grad_output, const at::Tensor& input,
                         const at::Tensor& saved, const OptionalTensor& weight,
                         const OptionalTensor& bias, const OptionalTensor& output, bool relu) {
  const ops::BatchNormSource source(kReduce, input);
  const c10::OptionalDeviceGuard guard(source.device());
  const std::int64_t channels = source.channels();
  kernels::BatchNormBackwardReduceArgs args;
  at::Tensor grad_holder;
  at::Tensor output_holder;
  args.shape = source.shape();
  args.input = source.kernel_input();
  args.grad_output = source.matching("grad_output", grad_output, grad_holder);
  args.weight = source.channel_input("weight", weight);
  args.bias = source.channel_input("bias", bias);
  args.saved = source.doubles("saved", saved, 2 * channels + 1);
  args.relu = relu;
  at::Tensor grad_residual = at::empty({0}, input.options());
  if (output && !relu) {
    ops::fail({kReduce, "output"}, "be None without relu", "a tensor");
  }
  if (output) {
    args.output = source.matching("output", *output, output_holder);
    grad_residual = source.empty_like_input();
    args.grad_residual = grad_residual.mutable_data_ptr();
  }
  const at::Tensor sums = source.empty_doubles(2 * channels);
  const auto options = source.tensor().options();
  const at::Tensor grad_weight =
      at::empty({channels}, options.dtype(gradient_dtype(input, weight)));
  const at::Tensor grad_bias = at::empty({channels}, options.dtype(gradient_dtype(input, bias)));
  args.sums = sums.mutable_data_ptr<double>();
  args.grad_weight = source.channel_output("weight", grad_weight);
  args.grad_bias = source.channel_output("bias", grad_bias);
  ops::run_batch_norm_backward_reduce(kReduce, source, args);
  return {sums, grad_weight, grad_bias, grad_residual};
}

ReduceResult reduce_meta(const at::Tensor& /*grad_output*/, const at::Tensor& input,
                         const at::Tensor& /*saved*/, const OptionalTensor& weight,
                         const OptionalTensor& bias, const OptionalTensor& output, bool /*relu*/) {
  const auto options = input.options();
  const c10::SymInt channels = input.sym_size(1);
  return {at::empty_symint({channels * 2}, options.dtype(at::kDouble)),
          at::empty_symint({channels}, options.dtype(gradient_dtype(input, weight))),
          at::empty_symint({channels}, options.dtype(gradient_dtype(input, bias))),
          output ? ops::empty_batch_norm_tensor(input, ops::batch_norm_layout(input))
                 : at::empty({0}, options)};
}

at::Tensor backward_elemt_impl(const at::Tensor& grad_output, const at::Tensor& input,
                               const at::Tensor& saved, const at::Tensor& sums,
                               const OptionalTensor& weight, const OptionalTensor& bias,
                               bool relu) {
  const ops::BatchNormSource source(kBackwardElemt, input);
  const c10::OptionalDeviceGuard guard(source.device());
  const std::int64_t channels = source.channels();
  kernels::BatchNormBackwardElemtArgs args;
  at::Tensor grad_holder;
  args.shape = source.shape();
  args.input = source.kernel_input();
  args.grad_output = source.matching("grad_output", grad_output, grad_holder);
  args.weight = source.channel_input("weight", weight);
  args.bias = source.channel_input("bias", bias);
  args.saved = source.doubles("saved", saved, 2 * channels + 1);
  args.sums = source.doubles("sums", sums, 2 * channels);
  args.relu = relu;
  const at::Tensor grad_input = source.empty_like_input();
  args.grad_input = grad_input.mutable_data_ptr();
  ops::run_batch_norm_backward_elemt(kBackwardElemt, source, args);
  return grad_input;
}

at::Tensor backward_elemt_meta(const at::Tensor& /*grad_output*/, const at::Tensor& input,
                               const at::Tensor& /*saved*/, const at::Tensor& /*sums*/,
                               const OptionalTensor& /*weight*/, const OptionalTensor& /*bias*/,
                               bool /*relu*/) {
  return ops::empty_batch_norm_tensor(input, ops::batch_norm_layout(input));
}

}  // namespace

ReduceResult batch_norm_backward_reduce(const at::Tensor& grad_output, const at::Tensor& input,
                                        const at::Tensor& saved, const OptionalTensor& weight,
                                        const OptionalTensor& bias, const OptionalTensor& output,
                                        bool relu) {
  return ops::call_op<batch_norm_backward_reduce>("torchfuse::batch_norm_backward_reduce",
                                                  grad_output, input, saved, weight, bias, output,
                                                  relu);
}

at::Tensor batch_norm_backward_elemt(const at::Tensor& grad_output, const at::Tensor& input,
                                     const at::Tensor& saved, const at::Tensor& sums,
                                     const OptionalTensor& weight, const OptionalTensor& bias,
                                     bool relu) {
  return ops::call_op<batch_norm_backward_elemt>(
      "torchfuse::batch_norm_backward_elemt", grad_output, input, saved, sums, weight, bias, relu);
}

TORCH_LIBRARY_FRAGMENT(torchfuse, m) {
  ops::register_op<reduce_impl, reduce_meta>(m, "batch_norm_backward_reduce");
  ops::register_op<backward_elemt_impl, backward_elemt_meta>(m, "batch_norm_backward_elemt");
}

}  // namespace torchfuse
