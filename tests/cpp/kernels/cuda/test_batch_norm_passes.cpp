// SPDX-License-Identifier: BSD-3-Clause
// Forward and backward pass of batch normalization: what is computed element by element has the
// bits of the CPU, gradient sums are those in fp64, every element is read once and written once.
// The statistics: test_batch_norm_stats.cpp.
#include <gtest/gtest.h>

#include "batch_norm_problem.h"

namespace torchfuse::kernels {
namespace {

using namespace testing;

struct Options {
  bool relu = false;
  bool residual = false;
  bool affine = true;
  bool evaluates = false;
  bool keeps_gradient = false;
  Strides x = {}, z = {}, dy = {};
  std::int64_t offset = 0;  ///< of what is written
};

/// One layer's tensors, on both sides.
struct Layer {
  BatchNormShape shape;
  Options options;
  ChannelTensor x, z, dy;
  ChannelVector weight, bias, mean, variance;

  Layer(const BatchNormShape& shape_, const Options& options_, std::mt19937& random)
      : shape(shape_),
        options(options_),
        x(ChannelTensor::normal(shape, random, 3.0, 2.0, options.x)),
        z(ChannelTensor::normal(shape, random, 0.0, 1.0, options.z)),
        dy(ChannelTensor::normal(shape, random, 0.1, 1.0, options.dy)) {
    std::normal_distribution<double> normal;
    const auto near_one = [&] { return 1.0 + 0.3 * std::abs(normal(random)); };
    if (options.affine) {
      weight = ChannelVector(DType::kFloat32, shape.channels, near_one);
      bias = ChannelVector(shape.dtype, shape.channels, [&] { return normal(random); });
    }
    if (options.evaluates) {
      mean = ChannelVector(DType::kFloat32, shape.channels, near_one);
      variance = ChannelVector(DType::kFloat64, shape.channels, near_one);
    }
  }

  BatchNormLayer on_host() const {
    BatchNormLayer layer{shape,          options.relu,    options.residual,    x.host_input(),
                         z.host_input(), dy.host_input(), weight.host_input(), bias.host_input()};
    layer.evaluates = options.evaluates;
    layer.running_mean = mean.host_output();
    layer.running_var = variance.host_output();
    return layer;
  }
  BatchNormLayer on_device() const {
    BatchNormLayer layer{shape,     options.relu, options.residual, x.input(),
                         z.input(), dy.input(),   weight.input(),   bias.input()};
    layer.keeps_gradient = options.keeps_gradient;
    layer.evaluates = options.evaluates;
    layer.running_mean = mean.output();
    layer.running_var = variance.output();
    return layer;
  }
};

void expect_same(const ChannelTensor& found, const Buffer& expected, const char* what) {
  for (std::int64_t i = 0; i < expected.numel(); ++i) {
    ASSERT_TRUE(same_value(found.host().get(i), expected.get(i)))
        << what << " " << i << ": " << found.host().get(i) << " instead of " << expected.get(i);
  }
}

/// Reads are counted where no other tensor lies in the gaps.
void expect_read_once(const ChannelTensor& tensor, const Strides& strides) {
  if (strides.channel_gap + strides.outer_gap == 0) tensor.expect_accesses(1, 0);
}

/// What the CPU writes behind the ReLU of a sum; it keeps no other gradient.
Buffer behind_relu(const Layer& layer, const BatchNormResults& cpu) {
  if (layer.on_host().gated_by_output()) return cpu.grad_residual;
  Buffer gradient(layer.shape.dtype, layer.shape.numel());
  for_each_place(layer.shape, [&](std::int64_t o, std::int64_t c, std::int64_t i) {
    const std::int64_t at = (o * layer.shape.channels + c) * layer.shape.inner + i;
    const bool passes = !layer.options.relu || !(cpu.output.get(at) <= 0);
    gradient.set(at, passes ? layer.dy.get(o, c, i) : 0.0);
  });
  return gradient;
}

/// The device's sums against those in fp64 of the gradient behind the ReLU.
void expect_sums(const Layer& layer, const BatchNormResults& cpu, const Buffer& gradient,
                 const std::vector<double>& sums, const Buffer& grad_weight,
                 const Buffer& grad_bias) {
  const BatchNormShape& shape = layer.shape;
  const auto channels = static_cast<std::size_t>(shape.channels);
  std::vector<double> dy(channels), dy_xhat(channels), size(channels), size_xhat(channels);
  for_each_place(shape, [&](std::int64_t o, std::int64_t c, std::int64_t i) {
    const auto at = static_cast<std::size_t>(c);
    const double passing = gradient.get((o * shape.channels + c) * shape.inner + i);
    const double xhat = (layer.x.get(o, c, i) - cpu.saved[at]) * cpu.saved[channels + at];
    dy[at] += passing, size[at] += std::abs(passing);
    dy_xhat[at] += passing * xhat, size_xhat[at] += std::abs(passing * xhat);
  });
  const double error = sum_error(shape.dtype);
  Buffer rounded_weight(DType::kFloat32, 1), rounded_bias(shape.dtype, 1);
  for (std::size_t c = 0; c < channels; ++c) {
    const double sum_xhat = sums[channels + c];
    ASSERT_NEAR(sums[c], dy[c], error * size[c]) << "channel " << c;
    // Elements that are close together are far from each other in units of their deviation.
    const double stretch = std::max(1.0, cpu.saved[channels + c]);
    if (std::isfinite(dy_xhat[c])) {
      ASSERT_NEAR(sum_xhat, dy_xhat[c], error * stretch * (size_xhat[c] + size[c]))
          << "channel " << c;
    } else {
      ASSERT_FALSE(std::isfinite(sum_xhat)) << "channel " << c;
    }
    rounded_weight.set(0, sum_xhat);
    rounded_bias.set(0, sums[c]);
    const auto at = static_cast<std::int64_t>(c);
    ASSERT_TRUE(same_value(grad_weight.get(at), rounded_weight.get(0)));
    ASSERT_EQ(grad_bias.get(at), rounded_bias.get(0));
  }
}

/// The gradient by the CPU's statistics and sums; `dz` is the gradient behind the ReLU.
void expect_gradient(const Layer& layer, const BatchNormResults& cpu, const double* saved,
                     const ChannelTensor& dz, const Workspace& workspace) {
  ChannelTensor dx(layer.shape,
                   {0, 0, 5 * layer.options.offset % elements_per_vector(layer.shape.dtype)});
  const DeviceArray<double> all_sums(cpu.sums);
  BatchNormBackwardElemtArgs backward = layer.on_device().backward(dz.input());
  backward.saved = saved;
  backward.sums = all_sums.data();
  backward.grad_input = dx.data();
  layer.x.upload();
  layer.dy.upload();
  expect_ok(batch_norm_backward_elemt_cuda(backward, workspace.multiprocessors_alone(), stream()),
            workspace);
  expect_read_once(layer.x, layer.options.x);
  dx.expect_accesses(0, 1);
  dx.download();
  expect_same(dx, cpu.grad_input, "gradient");
}

/// Every launch takes the CPU's statistics and sums, so that a difference is that launch's own.
/// Returns what the device makes of the layer, as far as it is compared.
BatchNormResults expect_bits_of_the_cpu(const Layer& layer) {
  const BatchNormShape& shape = layer.shape;
  const Options& options = layer.options;
  const BatchNormResults cpu =
      run_on_cpu(layer.on_host(), levels_here().back(), std::int64_t{1} << 40);
  const BatchNormLayer on_device = layer.on_device();
  const Workspace workspace(shape);
  ChannelTensor y(shape, {0, 0, options.offset});
  ChannelTensor dz(shape, {0, 0, 3 * options.offset % elements_per_vector(shape.dtype)});
  BatchNormResults found(shape);
  const DeviceArray<double> packed(cpu.packed);
  const auto saved = DeviceArray<double>::unwritten(2 * shape.channels + 1);
  BatchNormElemtArgs elemt = on_device.elemt();
  elemt.output = y.data();
  layer.x.upload();
  layer.z.upload();
  expect_ok(batch_norm_elemt_cuda(elemt, on_device.finish(packed.data(), saved.data()),
                                  workspace.arrivals_alone(), stream()),
            workspace);
  expect_read_once(layer.x, options.x);
  if (options.residual) expect_read_once(layer.z, options.z);
  y.expect_accesses(0, 1);
  saved.expect_accesses(0, 1);
  found.saved = saved.to_host();
  EXPECT_EQ(found.saved, cpu.saved);
  y.download();
  expect_same(y, cpu.output, "output");

  const auto sums = DeviceArray<double>::unwritten(2 * shape.channels);
  const auto grad_weight = DeviceTensor::unwritten(DType::kFloat32, shape.channels);
  const auto grad_bias = DeviceTensor::unwritten(shape.dtype, shape.channels);
  BatchNormBackwardReduceArgs reduce = on_device.reduce(y.input(), dz.data());
  reduce.saved = saved.data();
  reduce.sums = sums.data();
  reduce.grad_weight = {grad_weight.data(), DType::kFloat32};
  reduce.grad_bias = {grad_bias.data(), shape.dtype};
  for (const ChannelTensor* tensor : {&layer.x, &layer.dy, &std::as_const(y)}) tensor->upload();
  expect_ok(batch_norm_backward_reduce_cuda(reduce, workspace.get(), stream()), workspace);
  expect_read_once(layer.x, options.x);
  expect_read_once(layer.dy, options.dy);
  const bool keeps_gradient = on_device.gated_by_output() || options.keeps_gradient;
  y.expect_accesses(on_device.gated_by_output() ? 1 : 0, 0);
  dz.expect_accesses(0, keeps_gradient ? 1 : 0);
  sums.expect_accesses(0, 1);
  for (const DeviceTensor* tensor : {&grad_weight, &grad_bias}) {
    tensor->expect_margins_intact();
    tensor->expect_accesses(0, 1);
  }
  found.sums = sums.to_host();
  const Buffer gradient = behind_relu(layer, cpu);
  expect_sums(layer, cpu, gradient, found.sums, grad_weight.to_host(), grad_bias.to_host());
  dz.download();
  if (keeps_gradient) expect_same(dz, gradient, "gradient behind the ReLU");

  expect_gradient(layer, cpu, saved.data(), dz, workspace);
  found.output = y.host();
  found.grad_residual = dz.host();
  return found;
}

TEST(CudaBatchNormPasses, EveryShapeHasTheBitsOfTheCpu) {
  std::mt19937 random(1);
  std::uint64_t seed = 0;
  for (const BatchNormShape& shape : every_shape()) {
    SCOPED_TRACE(describe(shape));
    Options options;
    options.relu = seed % 3 != 0;
    options.residual = seed % 2 == 1;
    options.affine = seed % 5 != 0;
    options.evaluates = seed % 7 < 2;
    options.keeps_gradient = seed % 4 < 2;
    set_order_for(shape.dtype, seed++);
    expect_bits_of_the_cpu(Layer(shape, options, random));
    ASSERT_FALSE(HasFailure());
  }
}

TEST(CudaBatchNormPasses, SmallStridedAndMisalignedTensors) {
  std::mt19937 random(2);
  for (const DType dtype : kEveryDType) {
    const std::int64_t vec = elements_per_vector(dtype);
    for (const BatchNormShape& shape : {planes(dtype, 5, 3, 49), planes(dtype, 9, 3, 4 * vec),
                                        planes(dtype, 9, 5, 1), rows(dtype, 17, 2 * vec + 3)}) {
      for (std::int64_t offset = 0; offset < vec; ++offset) {
        SCOPED_TRACE(describe(shape) << ", offset " << offset);
        Options options;
        options.relu = true;
        options.residual = offset % 2 == 1;
        options.keeps_gradient = true;
        options.x = {offset % 3, offset, offset};
        options.z = {0, offset % 2 * vec, (3 * offset + 1) % vec};
        options.dy = {offset % 3, offset, (3 * offset + 1) % vec};
        options.offset = offset;
        set_order_for(dtype, static_cast<std::uint64_t>(offset));
        expect_bits_of_the_cpu(Layer(shape, options, random));
        ASSERT_FALSE(HasFailure());
      }
    }
  }
}

TEST(CudaBatchNormPasses, SmallSumsHaveTheSameBitsInAnyOrderOfExecution) {
  for (const DType dtype : kEveryDType) {
    for (const BatchNormShape& shape : small_shapes(dtype)) {
      SCOPED_TRACE(describe(shape));
      std::vector<double> expected;
      for (std::int64_t offset = 0; offset < elements_per_vector(dtype); ++offset) {
        std::mt19937 random(4);
        Options options{.relu = true};
        options.x.offset = options.dy.offset = offset;
        set_order_for(dtype, static_cast<std::uint64_t>(offset), offset % 2 == 0 ? 1 : 4);
        const std::vector<double> sums = expect_bits_of_the_cpu(Layer(shape, options, random)).sums;
        if (offset == 0) expected = sums;
        ASSERT_EQ(std::memcmp(sums.data(), expected.data(), sums.size() * sizeof(double)), 0);
      }
    }
  }
}

TEST(CudaBatchNormPasses, SmallEmptyInputHasZeroSums) {
  std::mt19937 random(5);
  for (const DType dtype : kEveryDType) {
    for (const BatchNormShape& shape : {planes(dtype, 0, 5, 49), rows(dtype, 0, 70)}) {
      set_order_for(dtype, 0);
      expect_bits_of_the_cpu(Layer(shape, {.relu = true}, random));
    }
  }
}

// Behind the ReLU and through its gate in the backward pass.
TEST(CudaBatchNormPasses, SmallNanPassesTheReluBothWays) {
  for (const DType dtype : kEveryDType) {
    for (const BatchNormShape& shape : small_shapes(dtype)) {
      for (const bool residual : {false, true}) {
        SCOPED_TRACE(describe(shape) << (residual ? ", residual" : ""));
        std::mt19937 random(6);
        Layer layer(shape,
                    {.relu = true, .residual = residual, .evaluates = true, .keeps_gradient = true},
                    random);
        const double infinity = std::numeric_limits<double>::infinity();
        const std::int64_t last = shape.outer - 1;
        layer.x.set(last, 1, 0, std::nan(""));
        layer.x.set(0, 1, 0, -infinity);
        layer.x.set(0, 2, 0, infinity);
        set_order_for(dtype, 1);
        const BatchNormResults found = expect_bits_of_the_cpu(layer);
        const auto place = [&](std::int64_t o, std::int64_t c) {
          return (o * shape.channels + c) * shape.inner;
        };
        EXPECT_TRUE(std::isnan(found.output.get(place(last, 1))));
        EXPECT_EQ(found.grad_residual.get(place(last, 1)), layer.dy.get(last, 1, 0));
        EXPECT_EQ(found.output.get(place(0, 1)), 0.0);
        EXPECT_EQ(found.grad_residual.get(place(0, 1)), 0.0);
        EXPECT_EQ(found.output.get(place(0, 2)), infinity);
      }
    }
  }
}

TEST(CudaBatchNormPasses, OutputsMoveSixteenBytesAtATime) {
  if (!accesses_are_counted()) GTEST_SKIP() << "accesses are not counted";
  for (const DType dtype : kEveryDType) {
    const std::int64_t vec = elements_per_vector(dtype);
    for (const BatchNormShape& shape :
         {planes(dtype, 4, 3, 1024), planes(dtype, 9, 5, vec), rows(dtype, 50, 8 * vec)}) {
      // Planes may begin anywhere, as long as input and output do so alike.
      for (const std::int64_t offset : {std::int64_t{0}, vec - 1}) {
        if (offset != 0 && shape.inner != 1024) continue;
        SCOPED_TRACE(describe(shape) << ", offset " << offset);
        std::mt19937 random(3);
        const ChannelTensor x = ChannelTensor::normal(shape, random, 0.0, 1.0, {0, 0, offset});
        const ChannelTensor y(shape, {0, 0, offset});
        const Workspace workspace(shape);
        const auto saved = DeviceArray<double>::unwritten(2 * shape.channels + 1);
        BatchNormFinishArgs finish;
        finish.channels = shape.channels;
        finish.saved = saved.data();
        BatchNormElemtArgs args;
        args.shape = shape;
        args.input = x.input();
        args.output = y.data();
        set_order_for(dtype, 0);
        expect_ok(batch_norm_elemt_cuda(args, finish, workspace.arrivals_alone(), stream()),
                  workspace);
        const std::int64_t planes = shape.outer * shape.channels;
        const std::int64_t extra = offset == 0 ? 0 : planes * (vec - 1);
        const auto accesses = static_cast<std::size_t>(shape.numel() / vec + extra);
        EXPECT_EQ(x.device().loads(), accesses);
        EXPECT_EQ(y.device().stores(), accesses);
      }
    }
  }
}

TEST(CudaBatchNormPasses, RefuseADTypeThatDoesNotExist) {
  BatchNormElemtArgs elemt;
  BatchNormBackwardReduceArgs reduce;
  BatchNormBackwardElemtArgs backward;
  elemt.shape = reduce.shape = backward.shape = planes(static_cast<DType>(9), 1, 1, 1);
  EXPECT_STREQ(batch_norm_elemt_cuda(elemt, {}, {}, stream()).what, "dtype of batch_norm_elemt");
  EXPECT_STREQ(batch_norm_backward_reduce_cuda(reduce, {}, stream()).what,
               "dtype of batch_norm_backward_reduce");
  EXPECT_STREQ(batch_norm_backward_elemt_cuda(backward, {}, stream()).what,
               "dtype of batch_norm_backward_elemt");
}

}  // namespace
}  // namespace torchfuse::kernels
