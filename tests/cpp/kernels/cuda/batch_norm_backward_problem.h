// SPDX-License-Identifier: BSD-3-Clause
// The backward pass of batch normalization on the device: its input, and a call of the launch that
// reduces.
#pragma once

#include "batch_norm_problem.h"

namespace torchfuse::kernels::testing {

enum class Relu { kNone, kFromInput, kFromOutput };

/// A batch, its saved statistics, and everything that the two launches write.
struct BackwardProblem {
  BatchNormShape shape;
  Relu relu = Relu::kNone;
  Strides strides;  ///< of the gradient
  std::int64_t offset = 0;
  ChannelTensor x, dy, y;
  ChannelVector weight, bias;
  std::vector<double> saved;

  BackwardProblem(const BatchNormShape& shape_, Relu relu_, std::mt19937& random,
                  const Strides& strides_ = {}, std::int64_t offset_ = 0, double count = 100.0)
      : shape(shape_),
        relu(relu_),
        strides(strides_),
        offset(offset_),
        x(ChannelTensor::normal(shape, random, 3.0, 2.0, {0, 0, offset})),
        dy(ChannelTensor::normal(shape, random, 0.1, 1.0, strides)),
        y(ChannelTensor::normal(shape, random, 0.0, 1.0)) {
    std::normal_distribution<double> normal;
    const auto near_one = [&] { return 1.0 + 0.3 * std::abs(normal(random)); };
    weight = ChannelVector(DType::kFloat32, shape.channels, near_one);
    bias = ChannelVector(DType::kFloat32, shape.channels, [&] { return normal(random); });
    for (std::int64_t c = 0; c < shape.channels; ++c) saved.push_back(3.0 + 0.1 * normal(random));
    for (std::int64_t c = 0; c < shape.channels; ++c) saved.push_back(0.5 * near_one());
    saved.push_back(count);
  }

  double mean(std::int64_t c) const { return saved[static_cast<std::size_t>(c)]; }
  double invstd(std::int64_t c) const {
    return saved[static_cast<std::size_t>(shape.channels + c)];
  }

  /// The gradient behind the ReLU. Its gate is the functor's, which decides about every sign.
  template <class T>
  double passing(std::int64_t o, std::int64_t c, std::int64_t i) const {
    double gate = 1.0;
    if (relu == Relu::kFromOutput) gate = y.get(o, c, i);
    if (relu == Relu::kFromInput) {
      const auto terms =
          normalize_terms<T>(mean(c), invstd(c), weight.get(c, 1.0), bias.get(c, 0.0));
      gate = static_cast<double>(
          normalize(static_cast<T>(x.get(o, c, i)) - terms.center, terms.scale, terms.shift));
    }
    return gate <= 0.0 ? 0.0 : dy.get(o, c, i);
  }
  double passing(std::int64_t o, std::int64_t c, std::int64_t i) const {
    return shape.dtype == DType::kFloat64 ? passing<double>(o, c, i) : passing<float>(o, c, i);
  }
};

/// What the reduction gives.
struct Reduced {
  std::vector<double> sums;
  Buffer grad_weight;
  Buffer grad_bias;
  Buffer grad_residual;
};

inline Reduced reduce(const BackwardProblem& problem, bool writes) {
  const BatchNormShape& shape = problem.shape;
  const Workspace workspace(shape);
  const DeviceArray<double> saved(problem.saved);
  const auto sums = DeviceArray<double>::unwritten(2 * shape.channels);
  const auto grad_weight = ChannelVector::unwritten(DType::kFloat32, shape.channels);
  const auto grad_bias = ChannelVector::unwritten(shape.dtype, shape.channels);
  ChannelTensor grad_residual(shape, {0, 0, (problem.offset + 1) % 2});
  problem.x.device().upload(problem.x.host().data());
  problem.dy.device().upload(problem.dy.host().data());
  problem.y.device().upload(problem.y.host().data());
  BatchNormBackwardReduceArgs args;
  args.shape = shape;
  args.grad_output = problem.dy.input();
  args.input = problem.x.input();
  if (problem.relu == Relu::kFromOutput) args.output = problem.y.input();
  args.weight = problem.weight.input();
  args.bias = problem.bias.input();
  args.relu = problem.relu != Relu::kNone;
  args.saved = saved.data();
  args.sums = sums.data();
  args.grad_weight = grad_weight.output();
  args.grad_bias = grad_bias.output();
  if (writes) args.grad_residual = grad_residual.data();
  expect_ok(batch_norm_backward_reduce_cuda(args, workspace.get(), stream()), workspace);
  problem.x.expect_accesses(1, 0);
  if (problem.strides.channel_gap + problem.strides.outer_gap == 0) {
    problem.dy.expect_accesses(1, 0);
  }
  problem.y.expect_accesses(problem.relu == Relu::kFromOutput ? 1 : 0, 0);
  grad_residual.expect_accesses(0, writes ? 1 : 0);
  grad_residual.download();
  sums.expect_accesses(0, 1);
  grad_weight.expect_accesses(0, 1);
  grad_bias.expect_accesses(0, 1);
  const auto vector_of = [&](const ChannelVector& vector, DType dtype) {
    Buffer buffer(dtype, shape.channels);
    for (std::int64_t c = 0; c < shape.channels; ++c) buffer.set(c, vector.device_value(c));
    return buffer;
  };
  return {sums.to_host(), vector_of(grad_weight, DType::kFloat32),
          vector_of(grad_bias, shape.dtype), grad_residual.host()};
}

}  // namespace torchfuse::kernels::testing
