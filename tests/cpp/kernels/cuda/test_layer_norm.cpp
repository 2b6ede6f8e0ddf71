// SPDX-License-Identifier: BSD-3-Clause
// Layer and RMS normalization on the device: values by the formula in fp64; every element of rows
// that fit the registers read once and written once; equal bits in every order of the threads.
#include <gtest/gtest.h>

#include "../layer_norm_problem.h"
#include "device.h"

namespace torchfuse::kernels {
namespace {

using namespace testing;

constexpr int kMultiprocessors = 2;

void expect_ok(const Status& status) {
  ASSERT_TRUE(status.ok()) << status.what << " " << status.error;
  synchronize();
}

/// Both passes on the device, tensors `offset` elements behind a 16-byte boundary.
LayerNormResults run(const LayerNormCase& c, const LayerNormInputs& in, std::int64_t offset,
                     bool counts = false) {
  const LayerNormShape& s = c.shape;
  const DeviceTensor x(in.x, offset), dy(in.dy, offset), weight(in.weight, offset),
      bias(in.bias, offset);
  LayerNormResults r(c);
  const auto unwritten = [&](const Buffer& host) {
    return DeviceTensor::unwritten(host.dtype(), host.numel(), offset);
  };
  const DeviceTensor output = unwritten(r.output), mean = unwritten(r.mean),
                     rstd = unwritten(r.rstd);
  LayerNormArgs forward;
  forward.shape = s;
  forward.input = x.data();
  if (c.affine) forward.weight = {weight.data(), c.params};
  if (c.affine) forward.bias = {bias.data(), c.params};
  forward.output = output.data();
  forward.mean = mean.data();
  forward.rstd = rstd.data();
  expect_ok(layer_norm_cuda(forward, kMultiprocessors, stream()));
  if (counts) x.expect_accesses(1, 0);
  output.expect_accesses(0, 1);
  rstd.expect_accesses(0, 1);
  mean.expect_accesses(0, s.rms ? 0 : 1);
  for (const DeviceTensor* tensor : {&x, &output, &mean, &rstd}) tensor->expect_margins_intact();

  const DeviceTensor y(output.to_host(), offset), means(mean.to_host()), rstds(rstd.to_host());
  const DeviceTensor grad_input = unwritten(r.grad_input), grad_weight = unwritten(r.grad_weight),
                     grad_bias = unwritten(r.grad_bias);
  const DeviceTensor partials =
      DeviceTensor::unwritten(compute_dtype(s.input), layer_norm_partials(s));
  const DeviceTensor& source = c.from_output ? y : x;
  LayerNormBackwardArgs backward;
  backward.shape = s;
  backward.grad_output = dy.data();
  backward.source = source.data();
  backward.from_output = c.from_output;
  backward.weight = forward.weight;
  backward.bias = forward.bias;
  backward.mean = means.data();
  backward.rstd = rstds.data();
  backward.grad_input = grad_input.data();
  expect_ok(layer_norm_backward_cuda(backward, kMultiprocessors, stream()));
  if (counts) dy.expect_accesses(1, 0);
  grad_input.expect_accesses(0, 1);
  grad_input.expect_margins_intact();
  if (c.affine) {
    backward.grad_input = nullptr;
    backward.grad_weight = {grad_weight.data(), c.params};
    backward.grad_bias = {grad_bias.data(), c.params};
    backward.partials = partials.data();
    expect_ok(layer_norm_backward_cuda(backward, kMultiprocessors, stream()));
    if (counts) dy.expect_accesses(2, 0);
    grad_weight.expect_accesses(0, 1);
    grad_bias.expect_accesses(0, 1);
    partials.expect_margins_intact();
    grad_weight.download(r.grad_weight.data());
    grad_bias.download(r.grad_bias.data());
  }
  output.download(r.output.data());
  if (!s.rms) mean.download(r.mean.data());
  rstd.download(r.rstd.data());
  grad_input.download(r.grad_input.data());
  return r;
}

void expect_right_and_ordered(LayerNormCase c, std::int64_t offset, bool counts) {
  if (c.shape.input == DType::kFloat64) c.params = DType::kFloat64;
  SCOPED_TRACE(name_of(c) + " offset " + std::to_string(offset));
  const LayerNormInputs in(c);
  set_order({0, 2, c.shape.input != DType::kFloat64});
  const LayerNormResults first = run(c, in, offset, counts);
  expect_right(c, in, first);
  set_order({7, 2, c.shape.input != DType::kFloat64});
  EXPECT_TRUE(run(c, in, offset) == first);
  set_order({});
}

TEST(CudaLayerNorm, SmallRowsOfAWarp) {
  for (LayerNormShape shape : layer_norm_types()) {
    shape.rows = 19;
    shape.columns = 37;
    expect_right_and_ordered({shape, true, false, DType::kFloat32}, 0, false);
    shape.columns = 64;
    expect_right_and_ordered({shape, true, true, shape.input}, 0, true);
  }
}

TEST(CudaLayerNorm, RowsOfABlock) {
  for (LayerNormShape shape : layer_norm_types()) {
    shape.rows = 3;
    shape.columns = 1288;
    expect_right_and_ordered({shape, true, false, shape.input}, 0, true);
    expect_right_and_ordered({shape, false, false, DType::kFloat32}, 1, true);
    shape.columns = 2051;
    expect_right_and_ordered({shape, true, true, DType::kFloat32}, 3, false);
  }
}

TEST(CudaLayerNorm, RowsLongerThanTheRegisters) {
  for (const LayerNormShape& types : layer_norm_types()) {
    LayerNormShape shape = types;
    shape.rows = 2;
    shape.columns = 9001;
    expect_right_and_ordered({shape, true, false, DType::kFloat32}, 0, false);
  }
}

TEST(CudaLayerNorm, SumsOfManyRows) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    expect_right_and_ordered({{1000, 9, false, dtype, dtype}, true, false, dtype}, 0, false);
    expect_right_and_ordered({{300, 264, true, dtype, dtype}, true, false, DType::kFloat32}, 0,
                             false);
  }
}

TEST(CudaLayerNorm, AnUnknownTypeIsAnError) {
  LayerNormArgs forward;
  LayerNormBackwardArgs backward;
  forward.shape = backward.shape = {1, 1, false, static_cast<DType>(9), DType::kFloat32};
  EXPECT_FALSE(layer_norm_cuda(forward, kMultiprocessors, stream()).ok());
  EXPECT_FALSE(layer_norm_backward_cuda(backward, kMultiprocessors, stream()).ok());
}

}  // namespace
}  // namespace torchfuse::kernels
