// SPDX-License-Identifier: BSD-3-Clause
// Layer and RMS normalization on the device: values by the formula in fp64; every element of rows
// that fit the registers read once and written once; equal bits in every order of the threads.
#include <gtest/gtest.h>

#include "../layer_norm_problem.h"
#include "device.h"

namespace torchfuse::kernels {
namespace {

using namespace testing;

/// A case's inputs and results on the device, `offset` elements behind a 16-byte boundary.
struct InputsOnDevice {
  DeviceTensor x, dy, weight, bias;
};
struct ResultsOnDevice {
  DeviceTensor output, mean, rstd, grad_input, grad_weight, grad_bias;
};

InputsOnDevice on_device(const LayerNormInputs& in, std::int64_t offset) {
  return {DeviceTensor(in.x, offset), DeviceTensor(in.dy, offset), DeviceTensor(in.weight, offset),
          DeviceTensor(in.bias, offset)};
}
ResultsOnDevice unwritten_results(const LayerNormResults& r, std::int64_t offset) {
  const auto unwritten = [&](const Buffer& host) {
    return DeviceTensor::unwritten(host.dtype(), host.numel(), offset);
  };
  return {unwritten(r.output),     unwritten(r.mean),        unwritten(r.rstd),
          unwritten(r.grad_input), unwritten(r.grad_weight), unwritten(r.grad_bias)};
}

/// Both passes on the device. `counts`: rows fit the registers, every element is read once.
LayerNormResults run(const LayerNormCase& c, const LayerNormInputs& in, std::int64_t offset,
                     bool counts = false) {
  LayerNormResults r(c);
  const InputsOnDevice inputs = on_device(in, offset);
  ResultsOnDevice results = unwritten_results(r, offset);
  expect_ok(layer_norm_cuda(layer_norm_args(c, inputs, results), kMultiprocessors, stream()));
  if (counts) inputs.x.expect_accesses(1, 0);
  results.output.expect_accesses(0, 1);
  results.rstd.expect_accesses(0, 1);
  results.mean.expect_accesses(0, c.shape.rms ? 0 : 1);

  LayerNormBackwardArgs args = layer_norm_backward_args(c, inputs, results);
  const DeviceTensor partials =
      DeviceTensor::unwritten(compute_dtype(c.shape.input), layer_norm_partials_cuda(c.shape));
  if (c.affine) {
    args.grad_weight = {results.grad_weight.data(), c.params};
    args.grad_bias = {results.grad_bias.data(), c.params};
    args.partials = partials.data();
  }
  expect_ok(layer_norm_backward_cuda(args, kMultiprocessors, stream()));
  if (counts) inputs.dy.expect_accesses(1, 0);
  results.grad_input.expect_accesses(0, 1);
  if (c.affine) {
    results.grad_weight.expect_accesses(0, 1);
    results.grad_bias.expect_accesses(0, 1);
    results.grad_weight.download(r.grad_weight.data());
    results.grad_bias.download(r.grad_bias.data());
  }
  for (const DeviceTensor* tensor :
       {&inputs.x, &std::as_const(results.output), &std::as_const(results.mean),
        &std::as_const(results.rstd), &std::as_const(results.grad_input), &partials}) {
    tensor->expect_margins_intact();
  }
  results.output.download(r.output.data());
  if (!c.shape.rms) results.mean.download(r.mean.data());
  results.rstd.download(r.rstd.data());
  results.grad_input.download(r.grad_input.data());
  return r;
}

void expect_right_and_ordered(const LayerNormCase& c, const LayerNormInputs& in,
                              std::int64_t offset, bool counts) {
  SCOPED_TRACE(name_of(c) + " offset " + std::to_string(offset));
  set_order({0, 2, c.shape.input != DType::kFloat64});
  const LayerNormResults first = run(c, in, offset, counts);
  expect_right(c, in, first);
  set_order({7, 2, c.shape.input != DType::kFloat64});
  EXPECT_TRUE(run(c, in, offset) == first);
  set_order({});
}

void expect_right_and_ordered(LayerNormCase c, std::int64_t offset, bool counts) {
  if (c.shape.input == DType::kFloat64) {
    c.params = DType::kFloat64;
    counts = counts && c.shape.columns <= 1024;  // what a block's registers hold
  }
  expect_right_and_ordered(c, LayerNormInputs(c), offset, counts);
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
    shape.columns = 9008;  // whole vectors
    expect_right_and_ordered({shape, true, true, DType::kFloat32}, 0, false);
  }
}

TEST(CudaLayerNorm, ErrorsDoNotGrowWithTheLengthOfARow) {
  for (const bool rms : {false, true}) {
    // The longest row of which no thread moves sums to fp64, the next one, and a long one.
    for (const std::int64_t columns : {15360, 15361, 1 << 18}) {
      const LayerNormCase c{{1, columns, rms, DType::kFloat32, DType::kFloat32}, false};
      expect_right_and_ordered(c, inputs_of_long_rows(c), 0, false);
    }
  }
}

TEST(CudaLayerNorm, EachGradientAloneHasTheSameBits) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const std::int64_t columns : {64, 1288, 9008}) {
      const LayerNormCase c{{20, columns, false, dtype, dtype}, true, false, dtype};
      const LayerNormInputs in(c);
      const InputsOnDevice inputs = on_device(in, 0);
      const LayerNormResults host(c);
      ResultsOnDevice all = unwritten_results(host, 0);
      expect_ok(layer_norm_cuda(layer_norm_args(c, inputs, all), kMultiprocessors, stream()));
      const DeviceTensor partials =
          DeviceTensor::unwritten(DType::kFloat32, layer_norm_partials_cuda(c.shape));
      LayerNormBackwardArgs args = layer_norm_backward_args(c, inputs, all);
      args.grad_weight = {all.grad_weight.data(), dtype};
      args.grad_bias = {all.grad_bias.data(), dtype};
      args.partials = partials.data();
      expect_ok(layer_norm_backward_cuda(args, kMultiprocessors, stream()));

      ResultsOnDevice alone = unwritten_results(host, 0);
      LayerNormBackwardArgs part = args;
      part.partials = nullptr;
      part.grad_input = alone.grad_input.data();
      expect_ok(layer_norm_backward_cuda(part, kMultiprocessors, stream()));
      part = args;
      part.grad_input = nullptr;
      part.grad_weight.data = alone.grad_weight.data();
      part.grad_bias.data = alone.grad_bias.data();
      expect_ok(layer_norm_backward_cuda(part, kMultiprocessors, stream()));
      EXPECT_TRUE(alone.grad_input.to_host() == all.grad_input.to_host());
      EXPECT_TRUE(alone.grad_weight.to_host() == all.grad_weight.to_host());
      EXPECT_TRUE(alone.grad_bias.to_host() == all.grad_bias.to_host());
    }
  }
}

TEST(CudaLayerNorm, ErrorsDoNotGrowWithTheNumberOfRows) {
  // Each of the four blocks' warps adds 1,250 rows.
  const LayerNormCase c{{40000, 9, true, DType::kFloat32, DType::kFloat32}};
  expect_right_and_ordered(c, inputs_of_long_rows(c), 0, false);
}

TEST(CudaLayerNorm, SumsOfManyRows) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    expect_right_and_ordered({{1000, 9, false, dtype, dtype}, true, false, dtype}, 0, false);
    expect_right_and_ordered({{300, 264, true, dtype, dtype}, true, false, DType::kFloat32}, 0,
                             false);
    // Several slices of rows that do not fit the registers.
    expect_right_and_ordered({{130, 4104, false, dtype, dtype}, true, false, dtype}, 0, false);
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
