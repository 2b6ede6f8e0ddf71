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

/// A case's inputs on the device, `offset` elements behind a 16-byte boundary.
struct OnDevice {
  const LayerNormCase& c;
  std::int64_t offset;
  bool counts;  ///< rows fit the registers: every element is read once
  DeviceTensor x, dy, weight, bias;

  OnDevice(const LayerNormCase& layer, const LayerNormInputs& in, std::int64_t at, bool counted)
      : c(layer),
        offset(at),
        counts(counted),
        x(in.x, at),
        dy(in.dy, at),
        weight(in.weight, at),
        bias(in.bias, at) {}

  DeviceTensor unwritten(const Buffer& host) const {
    return DeviceTensor::unwritten(host.dtype(), host.numel(), offset);
  }
  ChannelInput weights() const {
    return c.affine ? ChannelInput{weight.data(), c.params} : ChannelInput{};
  }
  ChannelInput biases() const {
    return c.affine ? ChannelInput{bias.data(), c.params} : ChannelInput{};
  }
};

void run_forward(const OnDevice& on, LayerNormResults& r) {
  const bool rms = on.c.shape.rms;
  const DeviceTensor output = on.unwritten(r.output), mean = on.unwritten(r.mean),
                     rstd = on.unwritten(r.rstd);
  LayerNormArgs args;
  args.shape = on.c.shape;
  args.input = on.x.data();
  args.weight = on.weights();
  args.bias = on.biases();
  args.output = output.data();
  args.mean = mean.data();
  args.rstd = rstd.data();
  expect_ok(layer_norm_cuda(args, kMultiprocessors, stream()));
  if (on.counts) on.x.expect_accesses(1, 0);
  output.expect_accesses(0, 1);
  rstd.expect_accesses(0, 1);
  mean.expect_accesses(0, rms ? 0 : 1);
  for (const DeviceTensor* tensor : {&on.x, &output, &mean, &rstd}) tensor->expect_margins_intact();
  output.download(r.output.data());
  if (!rms) mean.download(r.mean.data());
  rstd.download(r.rstd.data());
}

void run_backward(const OnDevice& on, LayerNormResults& r) {
  const LayerNormShape& s = on.c.shape;
  const DeviceTensor y(r.output, on.offset), mean(r.mean), rstd(r.rstd);
  const DeviceTensor grad_input = on.unwritten(r.grad_input),
                     grad_weight = on.unwritten(r.grad_weight),
                     grad_bias = on.unwritten(r.grad_bias);
  const DeviceTensor partials =
      DeviceTensor::unwritten(compute_dtype(s.input), layer_norm_partials(s));
  LayerNormBackwardArgs args;
  args.shape = s;
  args.grad_output = on.dy.data();
  args.source = on.c.from_output ? y.data() : on.x.data();
  args.from_output = on.c.from_output;
  args.weight = on.weights();
  args.bias = on.biases();
  args.mean = mean.data();
  args.rstd = rstd.data();
  args.grad_input = grad_input.data();
  expect_ok(layer_norm_backward_cuda(args, kMultiprocessors, stream()));
  if (on.counts) on.dy.expect_accesses(1, 0);
  grad_input.expect_accesses(0, 1);
  grad_input.expect_margins_intact();
  grad_input.download(r.grad_input.data());
  if (!on.c.affine) return;
  args.grad_input = nullptr;
  args.grad_weight = {grad_weight.data(), on.c.params};
  args.grad_bias = {grad_bias.data(), on.c.params};
  args.partials = partials.data();
  expect_ok(layer_norm_backward_cuda(args, kMultiprocessors, stream()));
  if (on.counts) on.dy.expect_accesses(2, 0);
  grad_weight.expect_accesses(0, 1);
  grad_bias.expect_accesses(0, 1);
  partials.expect_margins_intact();
  grad_weight.download(r.grad_weight.data());
  grad_bias.download(r.grad_bias.data());
}

/// Both passes on the device.
LayerNormResults run(const LayerNormCase& c, const LayerNormInputs& in, std::int64_t offset,
                     bool counts = false) {
  LayerNormResults r(c);
  const OnDevice on(c, in, offset, counts);
  run_forward(on, r);
  run_backward(on, r);
  return r;
}

void expect_right_and_ordered(LayerNormCase c, std::int64_t offset, bool counts) {
  if (c.shape.input == DType::kFloat64) {
    c.params = DType::kFloat64;
    counts = counts && c.shape.columns <= 1024;  // what a block's registers hold
  }
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

TEST(CudaLayerNorm, ErrorsDoNotGrowWithTheLengthOfARow) {
  for (const bool rms : {false, true}) {
    // The longest row of which no thread moves sums to fp64, the next one, and a long one.
    for (const std::int64_t columns : {15360, 15361, 1 << 18}) {
      const LayerNormCase c{{1, columns, rms, DType::kFloat32, DType::kFloat32}, false};
      SCOPED_TRACE(name_of(c));
      const LayerNormInputs in = inputs_of_long_rows(c);
      set_order({0, 2, true});
      const LayerNormResults first = run(c, in, 0);
      expect_right(c, in, first);
      set_order({7, 2, true});
      EXPECT_TRUE(run(c, in, 0) == first);
    }
  }
  set_order({});
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
