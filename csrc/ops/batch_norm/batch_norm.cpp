// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/batch_norm.h"

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

constexpr const char* kStats = "batch_norm_stats";
constexpr const char* kElemt = "batch_norm_elemt";

at::Tensor stats_impl(const at::Tensor& input) {
  const ops::BatchNormSource source(kStats, input);
  const c10::OptionalDeviceGuard guard(source.device());
  const at::Tensor packed = source.empty_doubles(kernels::packed_moments_size(source.channels()));
  kernels::BatchNormStatsArgs args;
  args.shape = source.shape();
  args.input = source.kernel_input();
  args.packed = packed.mutable_data_ptr<double>();
  ops::run_batch_norm_stats(kStats, source, args);
  return packed;
}

at::Tensor stats_meta(const at::Tensor& input) {
  return at::empty_symint({input.sym_size(1) * 4 + 1}, input.options().dtype(at::kDouble));
}

std::tuple<at::Tensor, at::Tensor> elemt_impl(
    const at::Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
    const OptionalTensor& packed, const OptionalTensor& running_mean,
    const OptionalTensor& running_var, const OptionalTensor& num_batches_tracked,
    const OptionalTensor& residual, std::optional<double> momentum, double eps, bool relu) {
  const ops::BatchNormSource source(kElemt, input);
  const c10::OptionalDeviceGuard guard(source.device());
  const std::int64_t channels = source.channels();
  kernels::BatchNormElemtArgs args;
  kernels::BatchNormFinishArgs finish;
  at::Tensor residual_holder;
  args.shape = source.shape();
  args.input = source.kernel_input();
  if (residual) args.residual = source.matching("residual", *residual, residual_holder);
  args.weight = source.channel_input("weight", weight);
  args.bias = source.channel_input("bias", bias);
  args.relu = relu;
  finish.channels = channels;
  finish.running_mean = source.channel_output("running_mean", running_mean);
  finish.running_var = source.channel_output("running_var", running_var);
  if (packed) {
    finish.packed = source.doubles("packed", *packed, kernels::packed_moments_size(channels));
  } else if (!running_mean || !running_var) {
    ops::fail({kElemt, "running_mean and running_var"}, "be tensors when packed is None", "none");
  }
  if (num_batches_tracked) {
    ops::check_scalar({kElemt, "num_batches_tracked"}, *num_batches_tracked, at::kLong);
    ops::check_same_device({kElemt, "num_batches_tracked"}, *num_batches_tracked, source.device(),
                           "input");
    finish.num_batches_tracked = num_batches_tracked->mutable_data_ptr<std::int64_t>();
  }
  finish.momentum = momentum.value_or(0.0);
  finish.cumulative = !momentum;
  finish.eps = eps;
  const at::Tensor saved = source.empty_doubles(2 * channels + 1);
  const at::Tensor output = source.empty_like_input();
  finish.saved = saved.mutable_data_ptr<double>();
  args.saved = finish.saved;
  args.output = output.mutable_data_ptr();
  ops::run_batch_norm_elemt(kElemt, source, finish, args);
  if (packed) {
    for (const OptionalTensor& written : {running_mean, running_var, num_batches_tracked}) {
      if (written) ops::mark_written(*written);
    }
  }
  return {output, saved};
}

std::tuple<at::Tensor, at::Tensor> elemt_meta(
    const at::Tensor& input, const OptionalTensor& /*weight*/, const OptionalTensor& /*bias*/,
    const OptionalTensor& /*packed*/, const OptionalTensor& /*running_mean*/,
    const OptionalTensor& /*running_var*/, const OptionalTensor& /*num_batches_tracked*/,
    const OptionalTensor& /*residual*/, std::optional<double> /*momentum*/, double /*eps*/,
    bool /*relu*/) {
  return {ops::empty_batch_norm_tensor(input, ops::batch_norm_layout(input)),
          at::empty_symint({input.sym_size(1) * 2 + 1}, input.options().dtype(at::kDouble))};
}

}  // namespace

at::Tensor batch_norm_stats(const at::Tensor& input) {
  return ops::call_op<batch_norm_stats>("torchfuse::batch_norm_stats", input);
}

std::tuple<at::Tensor, at::Tensor> batch_norm_elemt(
    const at::Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
    const OptionalTensor& packed, const OptionalTensor& running_mean,
    const OptionalTensor& running_var, const OptionalTensor& num_batches_tracked,
    const OptionalTensor& residual, std::optional<double> momentum, double eps, bool relu) {
  return ops::call_op<batch_norm_elemt>("torchfuse::batch_norm_elemt", input, weight, bias, packed,
                                        running_mean, running_var, num_batches_tracked, residual,
                                        momentum, eps, relu);
}

TORCH_LIBRARY_FRAGMENT(torchfuse, m) {
  ops::register_op<stats_impl, stats_meta>(m, "batch_norm_stats");
  ops::register_op<elemt_impl, elemt_meta>(m, "batch_norm_elemt");
}

}  // namespace torchfuse
