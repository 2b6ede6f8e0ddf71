// SPDX-License-Identifier: BSD-3-Clause
// One layer's forward and backward pass on the CPU: for the tests of its kernels, and as what the
// CUDA kernels are compared with.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernel_test.h"
#include "kernels/batch_norm.h"
#include "kernels/batch_norm_backward.h"

namespace torchfuse::kernels::testing {

/// Host memory for what a pass computes; NaN where it writes no number.
struct BatchNormResults {
  std::vector<double> packed, saved, sums;
  Buffer grad_weight, grad_bias, output, grad_input, grad_residual;

  explicit BatchNormResults(const BatchNormShape& shape)
      : packed(nans(packed_moments_size(shape.channels))),
        saved(nans(2 * shape.channels + 1)),
        sums(nans(2 * shape.channels)),
        grad_weight(DType::kFloat32, shape.channels),
        grad_bias(shape.dtype, shape.channels),
        output(shape.dtype, shape.numel()),
        grad_input(shape.dtype, shape.numel()),
        grad_residual(shape.dtype, shape.numel()) {}

  bool operator==(const BatchNormResults& other) const = default;

 private:
  static std::vector<double> nans(std::int64_t count) {
    return std::vector<double>(static_cast<std::size_t>(count), std::nan(""));
  }
};

/// One layer's tensors, on the host or on a device, and the arguments that follow from them.
struct BatchNormLayer {
  BatchNormShape shape;
  bool relu = false;
  bool residual = false;
  BatchNormInput x, z, dy;
  ChannelInput weight, bias;
  bool keeps_gradient = false;  ///< writes the gradient behind the ReLU in any case
  bool evaluates = false;       ///< by the running statistics, which are used in no other case
  ChannelOutput running_mean = {}, running_var = {};

  /// The backward pass reads the output where a residual was added before the ReLU.
  bool gated_by_output() const { return relu && residual; }

  BatchNormFinishArgs finish(const double* packed, double* saved) const {
    BatchNormFinishArgs args;
    args.channels = shape.channels;
    if (!evaluates) args.packed = packed;
    if (evaluates) args.running_mean = running_mean;
    if (evaluates) args.running_var = running_var;
    args.saved = saved;
    return args;
  }

  BatchNormElemtArgs elemt() const {
    BatchNormElemtArgs args;
    args.shape = shape;
    args.input = x;
    if (residual) args.residual = z;
    args.weight = weight;
    args.bias = bias;
    args.relu = relu;
    return args;
  }

  BatchNormBackwardReduceArgs reduce(const BatchNormInput& output, void* grad_residual) const {
    BatchNormBackwardReduceArgs args;
    args.shape = shape;
    args.grad_output = dy;
    args.input = x;
    if (gated_by_output()) args.output = output;
    if (gated_by_output() || keeps_gradient) args.grad_residual = grad_residual;
    args.weight = weight;
    args.bias = bias;
    args.relu = relu;
    return args;
  }

  BatchNormBackwardElemtArgs backward(const BatchNormInput& grad_residual) const {
    BatchNormBackwardElemtArgs args;
    args.shape = shape;
    args.grad_output = gated_by_output() ? grad_residual : dy;
    args.input = x;
    args.weight = weight;
    args.bias = bias;
    args.relu = relu && !gated_by_output();
    return args;
  }
};

/// Distance of neighboring numbers near 1.
inline double epsilon_of(DType dtype) {
  if (dtype == DType::kFloat64) return 0x1p-52;
  if (dtype == DType::kFloat32) return 0x1p-23;
  return dtype == DType::kFloat16 ? 0x1p-10 : 0x1p-7;
}

inline BatchNormInput dense_input(const BatchNormShape& shape, const void* data) {
  return {data, shape.channels * shape.inner, shape.inner};
}
inline BatchNormInput dense_input(const BatchNormShape& shape, const Buffer& buffer) {
  return dense_input(shape, buffer.data());
}

/// A pass at one level, the work in ranges of `step` items and elements.
inline BatchNormResults run_on_cpu(const BatchNormLayer& layer, CpuIsa isa, std::int64_t step) {
  const BatchNormShape& shape = layer.shape;
  BatchNormResults r(shape);
  const auto channels = static_cast<std::size_t>(shape.channels);
  const auto rows = static_cast<std::size_t>(batch_norm_partial_rows(shape));
  std::vector<double> partials(rows * channels * kStatsPartial);
  std::vector<double> terms(channels * (kNormalizeTerms + kGradInputTerms));
  const auto in_steps = [step](std::int64_t total, const auto& body) {
    for (std::int64_t i = 0; i < total; i += step) body(i, std::min(i + step, total));
  };

  const BatchNormStatsArgs stats{shape, layer.x, r.packed.data(), partials.data()};
  in_steps(batch_norm_items(shape),
           [&](auto i, auto j) { batch_norm_stats_cpu(isa, stats, i, j); });
  in_steps(shape.channels, [&](auto i, auto j) { batch_norm_pack_cpu(stats, i, j); });
  batch_norm_finish_cpu(layer.finish(r.packed.data(), r.saved.data()));

  BatchNormElemtArgs elemt = layer.elemt();
  elemt.saved = r.saved.data();
  elemt.output = r.output.data();
  elemt.terms = terms.data();
  batch_norm_elemt_terms_cpu(elemt);
  in_steps(shape.numel(), [&](auto i, auto j) { batch_norm_elemt_cpu(isa, elemt, i, j); });

  BatchNormBackwardReduceArgs reduce =
      layer.reduce(dense_input(shape, r.output), r.grad_residual.data());
  reduce.saved = r.saved.data();
  reduce.sums = r.sums.data();
  reduce.grad_weight = {r.grad_weight.data(), DType::kFloat32};
  reduce.grad_bias = {r.grad_bias.data(), shape.dtype};
  reduce.partials = partials.data();
  reduce.terms = terms.data();
  batch_norm_backward_reduce_terms_cpu(reduce);
  in_steps(batch_norm_items(shape),
           [&](auto i, auto j) { batch_norm_backward_reduce_cpu(isa, reduce, i, j); });
  in_steps(shape.channels, [&](auto i, auto j) { batch_norm_backward_sum_cpu(reduce, i, j); });

  BatchNormBackwardElemtArgs backward = layer.backward(dense_input(shape, r.grad_residual));
  backward.saved = r.saved.data();
  backward.sums = r.sums.data();
  backward.grad_input = r.grad_input.data();
  backward.terms = terms.data();
  batch_norm_backward_elemt_terms_cpu(backward);
  in_steps(shape.numel(),
           [&](auto i, auto j) { batch_norm_backward_elemt_cpu(isa, backward, i, j); });
  return r;
}

}  // namespace torchfuse::kernels::testing
