// SPDX-License-Identifier: BSD-3-Clause
// Batch normalization by the CPU's kernels and by the CUDA kernels: what is computed element by
// element has equal bits, statistics and sums are as near to each other as both are to fp64.
#include <gtest/gtest.h>

#include "batch_norm_problem.h"
#include "kernels/batch_norm_pass.h"

namespace torchfuse::kernels {
namespace {

using namespace testing;

/// One layer's input, on both sides.
struct Layer {
  BatchNormShape shape;
  bool relu;
  bool residual;
  ChannelTensor x, z, dy;
  ChannelVector weight, bias;  ///< fp32 on both sides; their host copies are weight_host, bias_host
  Buffer weight_host, bias_host;

  Layer(const BatchNormShape& shape_, bool relu_, bool residual_, std::mt19937& random)
      : shape(shape_),
        relu(relu_),
        residual(residual_),
        x(ChannelTensor::normal(shape, random, 3.0, 2.0)),
        z(ChannelTensor::normal(shape, random)),
        dy(ChannelTensor::normal(shape, random, 0.1)),
        weight_host(DType::kFloat32, shape.channels),
        bias_host(DType::kFloat32, shape.channels) {
    std::normal_distribution<double> normal;
    for (std::int64_t c = 0; c < shape.channels; ++c) {
      weight_host.set(c, 1.0 + 0.3 * normal(random));
      bias_host.set(c, normal(random));
    }
    std::int64_t next = 0;
    weight =
        ChannelVector(DType::kFloat32, shape.channels, [&] { return weight_host.get(next++); });
    next = 0;
    bias = ChannelVector(DType::kFloat32, shape.channels, [&] { return bias_host.get(next++); });
  }

  BatchNormLayer on_host() const {
    return {shape,
            relu,
            residual,
            dense_input(shape, x.host()),
            dense_input(shape, z.host()),
            dense_input(shape, dy.host()),
            {weight_host.data(), DType::kFloat32},
            {bias_host.data(), DType::kFloat32}};
  }
  BatchNormLayer on_device() const {
    return {shape, relu, residual, x.input(), z.input(), dy.input(), weight.input(), bias.input()};
  }
};

/// Every launch takes the CPU's statistics and sums, so that a difference is that launch's own.
BatchNormResults run_on_device(const Layer& layer, const BatchNormResults& cpu) {
  const BatchNormShape& shape = layer.shape;
  const BatchNormLayer on_device = layer.on_device();
  BatchNormResults r(shape);
  const Workspace workspace(shape);
  r.packed = stats_of(shape, layer.x);

  const DeviceArray<double> packed(cpu.packed);
  const auto saved = DeviceArray<double>::unwritten(2 * shape.channels + 1);
  BatchNormFinishArgs finish;
  finish.channels = shape.channels;
  finish.packed = packed.data();
  finish.saved = saved.data();
  ChannelTensor y(shape), dz(shape), dx(shape);
  BatchNormElemtArgs elemt = on_device.elemt();
  elemt.output = y.data();
  expect_ok(batch_norm_elemt_cuda(elemt, finish, workspace.arrivals_alone(), stream()), workspace);

  const DeviceArray<double> all_sums(cpu.sums);
  const auto sums = DeviceArray<double>::unwritten(2 * shape.channels);
  const auto grad_weight = DeviceTensor::unwritten(DType::kFloat32, shape.channels);
  const auto grad_bias = DeviceTensor::unwritten(DType::kFloat32, shape.channels);
  BatchNormBackwardReduceArgs reduce = on_device.reduce(y.input(), dz.data());
  reduce.saved = saved.data();
  reduce.sums = sums.data();
  reduce.grad_weight = {grad_weight.data(), DType::kFloat32};
  reduce.grad_bias = {grad_bias.data(), DType::kFloat32};
  expect_ok(batch_norm_backward_reduce_cuda(reduce, workspace.get(), stream()), workspace);

  BatchNormBackwardElemtArgs backward = on_device.backward(dz.input());
  backward.saved = saved.data();
  backward.sums = all_sums.data();
  backward.grad_input = dx.data();
  expect_ok(batch_norm_backward_elemt_cuda(backward, workspace.multiprocessors_alone(), stream()),
            workspace);

  r.saved = saved.to_host();
  r.sums = sums.to_host();
  r.grad_weight = grad_weight.to_host();
  r.grad_bias = grad_bias.to_host();
  const auto result_of = [](ChannelTensor& tensor) {
    tensor.download();
    return tensor.host();
  };
  r.output = result_of(y);
  r.grad_input = result_of(dx);
  if (on_device.gated_by_output()) r.grad_residual = result_of(dz);
  return r;
}

void expect_same_moments(const Layer& layer, const BatchNormResults& cpu,
                         const BatchNormResults& device) {
  ASSERT_EQ(device.packed.back(), cpu.packed.back());
  // The CPU's fp32 sums are longer, and taken about a channel's first element, wherever that lies.
  const double error = layer.shape.dtype == DType::kFloat64 ? 1e-13 : 3e-5;
  for (std::int64_t c = 0; c < layer.shape.channels; ++c) {
    const ChannelMoments ours = moments_of_packed(cpu.packed, c);
    const ChannelMoments theirs = moments_of_packed(device.packed, c);
    const auto variance = static_cast<double>(ours.variance);
    ASSERT_NEAR(static_cast<double>(theirs.mean - ours.mean), 0.0, error * std::sqrt(variance + 1));
    ASSERT_NEAR(static_cast<double>(theirs.variance), variance, error * (variance + 1e-6));
  }
}

void expect_same_sums(const Layer& layer, const BatchNormResults& cpu,
                      const BatchNormResults& device) {
  const auto count = static_cast<double>(layer.shape.outer * layer.shape.inner);
  const double error = 2.0 * sum_error(layer.shape.dtype) * (1.0 + count);
  for (std::size_t i = 0; i < cpu.sums.size(); ++i) {
    ASSERT_NEAR(device.sums[i], cpu.sums[i], error) << "sum " << i;
  }
  for (std::int64_t c = 0; c < layer.shape.channels; ++c) {
    ASSERT_NEAR(device.grad_weight.get(c), cpu.grad_weight.get(c), error + 1e-6 * count);
    ASSERT_NEAR(device.grad_bias.get(c), cpu.grad_bias.get(c), error + 1e-6 * count);
  }
}

TEST(CudaBatchNormCpu, ElementsHaveTheCpusBitsAndSumsAreNear) {
  std::mt19937 random(1);
  std::uint64_t seed = 0;
  for (const BatchNormShape& shape : every_shape()) {
    const bool relu = seed % 2 == 1;
    const bool residual = seed / 2 % 2 == 1;
    SCOPED_TRACE(describe(shape) << (relu ? ", ReLU" : "") << (residual ? ", residual" : ""));
    const Layer layer(shape, relu, residual, random);
    set_order_for(shape.dtype, seed++);
    const BatchNormResults cpu =
        run_on_cpu(layer.on_host(), levels_here().back(), std::int64_t{1} << 40);
    const BatchNormResults device = run_on_device(layer, cpu);
    expect_same_moments(layer, cpu, device);
    expect_same_sums(layer, cpu, device);
    ASSERT_EQ(device.saved, cpu.saved);
    ASSERT_TRUE(device.output == cpu.output);
    ASSERT_TRUE(device.grad_input == cpu.grad_input);
    ASSERT_TRUE(device.grad_residual == cpu.grad_residual);
  }
}

}  // namespace
}  // namespace torchfuse::kernels
