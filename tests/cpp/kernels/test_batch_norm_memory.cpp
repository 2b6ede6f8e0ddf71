// SPDX-License-Identifier: BSD-3-Clause
// Where the tensors of a batch normalization lie makes no difference to its bits: on cache lines or
// beside them, in one run or in slices of larger tensors.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "batch_norm_pass.h"
#include "kernels/batch_norm.h"
#include "kernels/batch_norm_backward.h"

namespace torchfuse::kernels::testing {
namespace {

BatchNormInput dense_at(const BatchNormShape& shape, const void* data) {
  return {data, shape.channels * shape.inner, shape.inner};
}

/// Calls body(begin, end) for ranges of `step` elements.
template <class Body>
void in_ranges(std::int64_t numel, std::int64_t step, const Body& body) {
  for (std::int64_t i = 0; i < numel; i += step) body(i, std::min(i + step, numel));
}

/// The output alone, into `output`.
void write_output(CpuIsa isa, const BatchNormShape& shape, const void* input, const void* residual,
                  void* output, std::int64_t step) {
  const auto channels = static_cast<std::size_t>(shape.channels);
  const std::vector<double> saved(2 * channels + 1, 0.5);
  std::vector<double> terms(channels * kNormalizeTerms);
  BatchNormElemtArgs args;
  args.shape = shape;
  args.input = dense_at(shape, input);
  args.residual = dense_at(shape, residual);
  args.saved = saved.data();
  args.output = output;
  args.terms = terms.data();
  batch_norm_elemt_terms_cpu(args);
  in_ranges(shape.numel(), step, [&](auto i, auto j) { batch_norm_elemt_cpu(isa, args, i, j); });
}

/// The gradient of `input` alone, into `grad_input`.
void write_grad_input(CpuIsa isa, const BatchNormShape& shape, const void* input,
                      const void* grad_output, void* grad_input, std::int64_t step) {
  const auto channels = static_cast<std::size_t>(shape.channels);
  const std::vector<double> saved(2 * channels + 1, 0.5);
  const std::vector<double> sums(2 * channels, 3.0);
  std::vector<double> terms(channels * (kNormalizeTerms + kGradInputTerms));
  BatchNormBackwardElemtArgs args;
  args.shape = shape;
  args.grad_output = dense_at(shape, grad_output);
  args.input = dense_at(shape, input);
  args.saved = saved.data();
  args.sums = sums.data();
  args.grad_input = grad_input;
  args.terms = terms.data();
  batch_norm_backward_elemt_terms_cpu(args);
  in_ranges(shape.numel(), step,
            [&](auto i, auto j) { batch_norm_backward_elemt_cpu(isa, args, i, j); });
}

/// Results that lie on lines may be streamed; the others, and a line that two ranges share, are
/// not.
void expect_same_bits_wherever_they_lie(const BatchNormShape& shape) {
  const auto size = static_cast<std::int64_t>(size_of(shape.dtype));
  Buffer x(shape.dtype, shape.numel()), dy(shape.dtype, shape.numel());
  std::mt19937 random(1);
  x.fill_normal(random);
  dy.fill_normal(random);
  const std::size_t bytes = static_cast<std::size_t>(shape.numel() * size);
  std::vector<char> first(bytes + 128), second(bytes + 128);
  const auto line_of = [](std::vector<char>& memory) {
    return memory.data() + (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64);
  };
  char* on_lines = line_of(first);
  char* off_lines = line_of(second) + size;
  for (const CpuIsa isa : levels_here()) {
    for (const auto write : {write_output, write_grad_input}) {
      std::fill(second.begin(), second.end(), char{2});
      write(isa, shape, x.data(), dy.data(), off_lines, shape.numel());
      for (const std::int64_t step : {shape.numel(), std::int64_t{100003}}) {
        std::fill(first.begin(), first.end(), char{1});
        write(isa, shape, x.data(), dy.data(), on_lines, step);
        EXPECT_EQ(std::memcmp(on_lines, off_lines, bytes), 0)
            << name_of(isa) << ", dtype " << static_cast<int>(shape.dtype) << ", step " << step;
        EXPECT_EQ(on_lines[-1], 1);
        EXPECT_EQ(on_lines[bytes], 1);
      }
    }
  }
}

TEST(BatchNormMemory, LargeRowsHaveTheSameBitsWhereverTheyLie) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16}) {
    const auto size = static_cast<std::int64_t>(size_of(dtype));
    expect_same_bits_wherever_they_lie({(std::int64_t{5} << 20) / (96 * size), 96, 1, true, dtype});
  }
}

TEST(BatchNormMemory, LargePlanesHaveTheSameBitsWhereverTheyLie) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16}) {
    const auto size = static_cast<std::int64_t>(size_of(dtype));
    // Planes that are whole lines, and planes that are not.
    expect_same_bits_wherever_they_lie({9, 7, (std::int64_t{48} << 10) / size, false, dtype});
    expect_same_bits_wherever_they_lie({9, 7, (std::int64_t{48} << 10) / size + 1, false, dtype});
  }
}

/// Rows and planes that lie apart have the bits of those that do not.
TEST(BatchNormMemory, SlicesHaveTheBitsOfTheirCopies) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const BatchNormShape& shape :
         {BatchNormShape{37, 70, 1, true, dtype}, BatchNormShape{5, 6, 40, false, dtype}}) {
      const std::int64_t channel_stride = shape.channels_last ? 1 : shape.inner + 3;
      const std::int64_t outer_stride = (shape.channels + 2) * channel_stride;
      Buffer slices[] = {Buffer(dtype, shape.outer * outer_stride),
                         Buffer(dtype, shape.outer * outer_stride),
                         Buffer(dtype, shape.outer * outer_stride)};
      Buffer copies[] = {Buffer(dtype, shape.numel()), Buffer(dtype, shape.numel()),
                         Buffer(dtype, shape.numel())};
      std::mt19937 random(1);
      for (std::size_t t = 0; t < 3; ++t) {
        slices[t].fill_normal(random);
        for (std::int64_t i = 0; i < shape.numel(); ++i) {
          const std::int64_t plane = i / shape.inner;
          copies[t].set(i,
                        slices[t].get(plane / shape.channels * outer_stride +
                                      plane % shape.channels * channel_stride + i % shape.inner));
        }
      }
      const auto run = [&](const Buffer(&of)[3], auto input_of) {
        BatchNormLayer layer{shape,           true, true, input_of(of[0]), input_of(of[1]),
                             input_of(of[2]), {},   {}};
        return run_on_cpu(layer, levels_here().back(), 1 << 30);
      };
      const auto sliced = [&](const Buffer& buffer) {
        return BatchNormInput{buffer.data(), outer_stride, channel_stride};
      };
      const auto copied = [&](const Buffer& buffer) { return dense_input(shape, buffer); };
      EXPECT_TRUE(run(slices, sliced) == run(copies, copied))
          << shape.channels_last << ", dtype " << static_cast<int>(dtype);
    }
  }
}

}  // namespace
}  // namespace torchfuse::kernels::testing
