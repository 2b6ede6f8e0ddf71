// SPDX-License-Identifier: BSD-3-Clause
// Batch normalization on the CPU, without torch: values, equal bits at every instruction level, for
// every division of the work and wherever tensors lie, and no access outside of a tensor.
#include "kernels/batch_norm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "batch_norm_pass.h"
#include "kernels/functors/batch_norm.h"
#include "recorded_results.h"

namespace torchfuse::kernels::testing {
namespace {

struct Case {
  BatchNormShape shape;
  bool relu;
  bool residual;
};

std::string name_of(const Case& c) {
  const BatchNormShape& s = c.shape;
  return std::to_string(s.outer) + "x" + std::to_string(s.channels) + "x" +
         std::to_string(s.inner) + (s.channels_last ? " rows" : " planes") + " dtype " +
         std::to_string(static_cast<int>(s.dtype)) + (c.relu ? " relu" : "") +
         (c.residual ? " residual" : "");
}

/// One layer's tensors, `offset` elements into their allocations.
class Layer {
 public:
  Layer(const Case& c, std::int64_t offset)
      : case_(c),
        x_(c.shape.dtype, c.shape.numel(), offset),
        z_(c.shape.dtype, c.shape.numel(), offset),
        dy_(c.shape.dtype, c.shape.numel(), offset),
        weight_(static_cast<std::size_t>(c.shape.channels)),
        bias_(weight_.size()) {
    std::mt19937 random(1);
    x_.fill_normal(random, 2.0);
    z_.fill_normal(random);
    dy_.fill_normal(random);
    std::normal_distribution<float> normal;
    for (float& value : weight_) value = 1.0F + 0.2F * normal(random);
    for (float& value : bias_) value = normal(random);
  }

  /// Work in ranges of `step` items and elements.
  BatchNormResults run(CpuIsa isa, std::int64_t step) const {
    return run_on_cpu(on_host(), isa, step);
  }

  BatchNormLayer on_host() const {
    const BatchNormShape& s = case_.shape;
    return {s,
            case_.relu,
            case_.residual,
            dense_input(s, x_),
            dense_input(s, z_),
            dense_input(s, dy_),
            {weight_.data(), DType::kFloat32},
            {bias_.data(), DType::kFloat32}};
  }

  /// The textbook's statistics in fp64.
  void expect_right_statistics(const BatchNormResults& r) const {
    const BatchNormShape& shape = case_.shape;
    const double tolerance = shape.dtype == DType::kFloat64 ? 1e-10 : 1e-4;
    const auto n = static_cast<double>(shape.outer * shape.inner);
    ASSERT_EQ(r.saved.back(), n);
    for (std::int64_t c = 0; c < shape.channels; ++c) {
      double mean = 0;
      double var = 0;
      for_channel(c, [&](std::int64_t i) { mean += x_.get(i) / n; });
      for_channel(c, [&](std::int64_t i) { var += (x_.get(i) - mean) * (x_.get(i) - mean) / n; });
      const double invstd = 1 / std::sqrt(var + 1e-5);
      const auto at = static_cast<std::size_t>(c);
      ASSERT_NEAR(r.saved[at], mean, tolerance * (std::sqrt(var) + std::abs(mean)));
      ASSERT_NEAR(r.saved[static_cast<std::size_t>(shape.channels + c)], invstd,
                  tolerance * invstd);
    }
  }

  /// What follows from the saved statistics, by the formulas in fp64; gates as `r` has them.
  void expect_right(const BatchNormResults& r) const {
    const BatchNormShape& shape = case_.shape;
    const double epsilon = epsilon_of(shape.dtype);
    const double of_sums = (shape.dtype == DType::kFloat64 ? 1e-10 : 1e-4) *
                           std::max(1.0, 4.0 * std::sqrt(shape.outer * shape.inner));
    const double count = r.saved.back();
    for (std::int64_t c = 0; c < shape.channels; ++c) {
      const auto at = static_cast<std::size_t>(c);
      const auto behind = static_cast<std::size_t>(shape.channels + c);
      const double mean = r.saved[at];
      const double invstd = r.saved[behind];
      const double gamma = static_cast<double>(weight_[at]);
      const double beta = static_cast<double>(bias_[at]);
      // Of a channel with few elements, which may be close together.
      const double stretch = std::max(1.0, invstd);
      double sum = 0;
      double sum_xhat = 0;
      const auto xhat = [&](std::int64_t i) { return (x_.get(i) - mean) * invstd; };
      const auto pre = [&](std::int64_t i) {
        return xhat(i) * gamma + beta + (case_.residual ? z_.get(i) : 0.0);
      };
      const auto grad = [&](std::int64_t i) {
        return case_.relu && r.output.get(i) <= 0 ? 0.0 : dy_.get(i);
      };
      for_channel(c, [&](std::int64_t i) {
        sum += grad(i);
        sum_xhat += grad(i) * xhat(i);
        const double y = case_.relu ? std::max(pre(i), 0.0) : pre(i);
        ASSERT_NEAR(r.output.get(i), y, 8.0 * epsilon * stretch * (4.0 + std::abs(y)));
      });
      ASSERT_NEAR(r.sums[at], sum, of_sums);
      ASSERT_NEAR(r.sums[behind], sum_xhat, of_sums * stretch);
      Buffer grad_weight(DType::kFloat32, 1), grad_bias(shape.dtype, 1);
      grad_weight.set(0, r.sums[behind]);
      grad_bias.set(0, r.sums[at]);
      ASSERT_EQ(r.grad_weight.get(c), grad_weight.get(0));
      ASSERT_EQ(r.grad_bias.get(c), grad_bias.get(0));
      for_channel(c, [&](std::int64_t i) {
        double dx = grad(i);
        if (count > 0) dx -= (r.sums[at] + xhat(i) * r.sums[behind]) / count;
        dx *= gamma * invstd;
        ASSERT_NEAR(r.grad_input.get(i), dx,
                    16.0 * epsilon * stretch * stretch * (2.0 + std::abs(xhat(i)) + std::abs(dx)));
      });
    }
  }

 private:
  template <class Visit>
  void for_channel(std::int64_t c, const Visit& visit) const {
    const BatchNormShape& s = case_.shape;
    for (std::int64_t o = 0; o < s.outer; ++o) {
      for (std::int64_t i = 0; i < s.inner; ++i) {
        visit(s.channels_last ? o * s.channels + c : (o * s.channels + c) * s.inner + i);
      }
    }
  }

  Case case_;
  Buffer x_, z_, dy_;
  std::vector<float> weight_, bias_;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const DType dtype : kEveryDType) {
    for (const BatchNormShape& shape :
         {BatchNormShape{3, 5, 1, true, dtype}, BatchNormShape{700, 17, 1, true, dtype},
          BatchNormShape{9, 600, 1, true, dtype}, BatchNormShape{4, 3, 49, false, dtype},
          BatchNormShape{2, 3, 1, false, dtype}, BatchNormShape{300, 2, 33, false, dtype},
          BatchNormShape{2, 2, 20000, false, dtype}}) {
      for (const bool relu : {false, true}) {
        for (const bool residual : {false, true}) all.push_back({shape, relu, residual});
      }
    }
  }
  return all;
}

TEST(BatchNorm, ValuesAndBitsAtEveryLevel) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(name_of(c));
    const Layer layer(c, /*offset=*/1);
    const BatchNormResults expected = layer.run(levels_here().back(), 1 << 30);
    layer.expect_right_statistics(expected);
    layer.expect_right(expected);
    record(expected.packed, expected.saved, expected.sums, expected.grad_weight, expected.grad_bias,
           expected.output, expected.grad_input);
    for (const CpuIsa isa : levels_here()) {
      EXPECT_TRUE(layer.run(isa, 1 << 30) == expected) << name_of(isa);
    }
    // Of few items, and of many.
    EXPECT_TRUE(layer.run(levels_here().back(), 5) == expected);
    EXPECT_TRUE(layer.run(levels_here().back(), c.shape.channels_last ? 1111 : 777) == expected);
  }
}

TEST(BatchNorm, ASingleElementHasNoVariance) {
  EXPECT_EQ(unbiased_variance({1.0, 3.0, 0.0}), 0.0);
  EXPECT_EQ(unbiased_variance({2.0, 3.0, 8.0}), 8.0);
}

TEST(BatchNorm, EvaluationUsesTheRunningStatistics) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(name_of(c));
    const Layer layer(c, 0);
    Buffer mean(DType::kFloat32, c.shape.channels), var(DType::kFloat64, c.shape.channels);
    std::mt19937 random(3);
    mean.fill_normal(random);
    var.fill_abs_normal(random);
    for (std::int64_t i = 0; i < var.numel(); ++i) var.set(i, 1.0 + var.get(i));
    BatchNormLayer on_host = layer.on_host();
    on_host.evaluates = true;
    on_host.running_mean = {mean.data(), mean.dtype()};
    on_host.running_var = {var.data(), var.dtype()};
    const BatchNormResults r = run_on_cpu(on_host, levels_here().back(), 1 << 30);
    ASSERT_EQ(r.saved.back(), 0.0);
    for (std::int64_t i = 0; i < c.shape.channels; ++i) {
      const double invstd = 1.0 / std::sqrt(var.get(i) + 1e-5);
      ASSERT_EQ(r.saved[static_cast<std::size_t>(i)], mean.get(i));
      ASSERT_NEAR(r.saved[static_cast<std::size_t>(c.shape.channels + i)], invstd, 1e-15);
    }
    layer.expect_right(r);
  }
}

TEST(BatchNorm, EmptyTensorsGiveZeros) {
  for (const bool channels_last : {false, true}) {
    const Case c{{0, 3, channels_last ? 1 : 4, channels_last, DType::kBFloat16}, false, false};
    const BatchNormResults r = Layer(c, 0).run(levels_here().back(), 1 << 30);
    EXPECT_EQ(r.packed, std::vector<double>(13, 0.0));
    EXPECT_EQ(r.sums, std::vector<double>(6, 0.0));
    for (const double value : r.saved) EXPECT_TRUE(std::isfinite(value));
  }
}

TEST(BatchNorm, MomentsAddUpExactlyWhateverTheMean) {
  std::mt19937 random(2);
  for (const double mean : {0.0, 1.0, 1e4, -1e6, 1e9}) {
    std::normal_distribution<double> normal(mean, 1.0);
    std::vector<double> pooled(5, 0.0);
    std::vector<double> all;
    for (const int count : {1, 7, 0, 300}) {
      std::vector<double> own;
      for (int i = 0; i < count; ++i) own.push_back(normal(random));
      all.insert(all.end(), own.begin(), own.end());
      PivotedSums sums;
      for (const double value : own) sums = merge(sums, PivotedSums{value, 0.0, 0.0, 1.0});
      double packed[5] = {};
      pack_moments(moments_of(sums), packed, 0, 1);
      packed[4] = count;
      for (int i = 0; i < 5; ++i) pooled[static_cast<std::size_t>(i)] += packed[i];
    }
    long double exact_mean = 0;
    for (const double value : all) exact_mean += value;
    exact_mean /= static_cast<long double>(all.size());
    long double exact_m2 = 0;
    for (const double value : all) exact_m2 += (value - exact_mean) * (value - exact_mean);
    const Moments moments = unpack_moments(pooled.data(), 0, 1);
    EXPECT_EQ(moments.count, 308.0);
    EXPECT_NEAR(moments.mean, static_cast<double>(exact_mean), std::abs(mean) * 4e-16 + 4e-15);
    // 77 bits of the squares are added up; the ranks' own means are rounded to 53.
    const double lost = mean * mean * 0x1p-75 + std::abs(mean) * 1e-15;
    EXPECT_NEAR(moments.m2 / static_cast<double>(exact_m2), 1.0, lost + 1e-13) << mean;
  }
}

// --- Where tensors lie makes no difference: on cache lines, beside them, in slices ---------------

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
  args.input = dense_input(shape, input);
  args.residual = dense_input(shape, residual);
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
  args.grad_output = dense_input(shape, grad_output);
  args.input = dense_input(shape, input);
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
  for (const DType dtype : kEveryDType) {
    const auto size = static_cast<std::int64_t>(size_of(dtype));
    expect_same_bits_wherever_they_lie({(std::int64_t{5} << 20) / (96 * size), 96, 1, true, dtype});
  }
}

TEST(BatchNormMemory, LargePlanesHaveTheSameBitsWhereverTheyLie) {
  for (const DType dtype : kEveryDType) {
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
