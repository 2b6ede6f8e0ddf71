// SPDX-License-Identifier: BSD-3-Clause
// Rows with their gradients, and what layer normalization makes of them by its formula in fp64.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "kernel_test.h"
#include "kernels/layer_norm.h"
#include "kernels/layer_norm_backward.h"

namespace torchfuse::kernels::testing {

struct LayerNormCase {
  LayerNormShape shape;
  bool affine = true;
  bool from_output = false;
  DType params = DType::kFloat32;
};

inline std::string name_of(const LayerNormCase& c) {
  const LayerNormShape& s = c.shape;
  return std::to_string(s.rows) + "x" + std::to_string(s.columns) + (s.rms ? " rms" : "") +
         " dtypes " + std::to_string(static_cast<int>(s.input)) + " " +
         std::to_string(static_cast<int>(s.output)) + " " +
         std::to_string(static_cast<int>(c.params)) + (c.affine ? "" : " plain") +
         (c.from_output ? " from output" : "");
}

/// Every pair of storage types.
inline std::vector<LayerNormShape> layer_norm_types() {
  std::vector<LayerNormShape> types;
  for (const bool rms : {false, true}) {
    for (const DType dtype : kEveryDType) {
      types.push_back({0, 0, rms, dtype, dtype});
    }
    types.push_back({0, 0, rms, DType::kFloat16, DType::kFloat32});
    types.push_back({0, 0, rms, DType::kBFloat16, DType::kFloat32});
  }
  return types;
}

inline DType compute_dtype(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

/// The inputs, `offset` elements into their allocations.
struct LayerNormInputs {
  Buffer x, dy, weight, bias;

  LayerNormInputs(const LayerNormCase& c, std::int64_t offset = 0, double center = 1.0)
      : x(c.shape.input, c.shape.rows * c.shape.columns, offset),
        dy(c.shape.output, c.shape.rows * c.shape.columns, offset),
        weight(c.params, c.shape.columns, offset),
        bias(c.params, c.shape.columns, offset) {
    std::mt19937 random(1);
    std::normal_distribution<double> normal;
    for (std::int64_t i = 0; i < x.numel(); ++i) x.set(i, center + 2.0 * normal(random));
    dy.fill_normal(random);
    for (std::int64_t i = 0; i < weight.numel(); ++i) weight.set(i, 1.0 + 0.2 * normal(random));
    bias.fill_normal(random);
  }
};

/// Rows whose sums are rounded in the same direction at every element: of x, of its squares, of the
/// gradient and of its product with x_hat.
inline LayerNormInputs inputs_of_long_rows(const LayerNormCase& c) {
  LayerNormInputs in(c);
  for (std::int64_t i = 0; i < in.x.numel(); ++i) {
    in.x.set(i, c.shape.rms || i % 3 == 0 ? 0.7 : 0.1);
    in.dy.set(i, 0.1);
  }
  return in;
}

/// What a pass computes; NaN where it writes no number.
struct LayerNormResults {
  Buffer output, mean, rstd, grad_input, grad_weight, grad_bias;

  explicit LayerNormResults(const LayerNormCase& c)
      : output(c.shape.output, c.shape.rows * c.shape.columns),
        mean(compute_dtype(c.shape.input), c.shape.rows),
        rstd(compute_dtype(c.shape.input), c.shape.rows),
        grad_input(c.shape.input, c.shape.rows * c.shape.columns),
        grad_weight(c.params, c.shape.columns),
        grad_bias(c.params, c.shape.columns) {
    for (Buffer* buffer : {&output, &mean, &rstd, &grad_input, &grad_weight, &grad_bias}) {
      for (std::int64_t i = 0; i < buffer->numel(); ++i) buffer->set(i, std::nan(""));
    }
  }

  bool operator==(const LayerNormResults& other) const = default;
};

/// The arguments of both passes for inputs and results on the host or on a device.
template <class Inputs, class Results>
LayerNormArgs layer_norm_args(const LayerNormCase& c, const Inputs& in, Results& r) {
  LayerNormArgs args;
  args.shape = c.shape;
  args.input = in.x.data();
  if (c.affine) args.weight = {in.weight.data(), c.params};
  if (c.affine) args.bias = {in.bias.data(), c.params};
  args.output = r.output.data();
  args.mean = r.mean.data();
  args.rstd = r.rstd.data();
  return args;
}
template <class Inputs, class Results>
LayerNormBackwardArgs layer_norm_backward_args(const LayerNormCase& c, const Inputs& in,
                                               Results& r) {
  const LayerNormArgs forward = layer_norm_args(c, in, r);
  LayerNormBackwardArgs args;
  args.shape = c.shape;
  args.grad_output = in.dy.data();
  args.source = c.from_output ? forward.output : forward.input;
  args.from_output = c.from_output;
  args.weight = forward.weight;
  args.bias = forward.bias;
  args.mean = r.mean.data();
  args.rstd = r.rstd.data();
  args.grad_input = r.grad_input.data();
  return args;
}

inline double tolerance_of(DType dtype) {
  if (dtype == DType::kFloat64) return 1e-12;
  if (dtype == DType::kFloat32) return 2e-6;
  return dtype == DType::kFloat16 ? 1.5e-3 : 1.2e-2;
}

/// Compares with the formulas at the head of functors/layer_norm.h.
inline void expect_right(const LayerNormCase& c, const LayerNormInputs& in,
                         const LayerNormResults& r) {
  const LayerNormShape& s = c.shape;
  const auto n = static_cast<double>(s.columns);
  const auto weight = [&](std::int64_t j) { return c.affine ? in.weight.get(j) : 1.0; };
  const auto bias = [&](std::int64_t j) { return c.affine ? in.bias.get(j) : 0.0; };
  // What an output was rounded to is all that is left of x_hat.
  const double x_hat_error = c.from_output ? 4.0 * tolerance_of(s.output) : 0.0;
  std::vector<double> weight_sums(static_cast<std::size_t>(s.columns));
  std::vector<double> bias_sums(weight_sums.size());
  for (std::int64_t row = 0; row < s.rows; ++row) {
    const auto at = [&](std::int64_t j) { return row * s.columns + j; };
    double mean = 0.0;
    double square = 0.0;
    for (std::int64_t j = 0; j < s.columns && !s.rms; ++j) mean += in.x.get(at(j)) / n;
    for (std::int64_t j = 0; j < s.columns; ++j) {
      square += (in.x.get(at(j)) - mean) * (in.x.get(at(j)) - mean) / n;
    }
    const double rstd = 1.0 / std::sqrt(square + 1e-5);
    const double rounding = tolerance_of(compute_dtype(s.input));
    if (!s.rms) {
      ASSERT_NEAR(r.mean.get(row), mean, rounding * (1.0 + std::abs(mean)));
    }
    ASSERT_NEAR(r.rstd.get(row), rstd, 2.0 * rounding * rstd);
    double mean_g = 0.0;
    double mean_g_x_hat = 0.0;
    const auto x_hat = [&](std::int64_t j) { return (in.x.get(at(j)) - mean) * rstd; };
    const auto g = [&](std::int64_t j) { return in.dy.get(at(j)) * weight(j); };
    for (std::int64_t j = 0; j < s.columns; ++j) {
      if (!s.rms) mean_g += g(j) / n;
      mean_g_x_hat += g(j) * x_hat(j) / n;
      weight_sums[static_cast<std::size_t>(j)] += in.dy.get(at(j)) * x_hat(j);
      bias_sums[static_cast<std::size_t>(j)] += in.dy.get(at(j));
    }
    for (std::int64_t j = 0; j < s.columns; ++j) {
      const double y = x_hat(j) * weight(j) + bias(j);
      ASSERT_NEAR(r.output.get(at(j)), y, tolerance_of(s.output) * (2.0 + std::abs(y)))
          << "output " << row << ", " << j;
      const double dx = rstd * (g(j) - mean_g - x_hat(j) * mean_g_x_hat);
      ASSERT_NEAR(r.grad_input.get(at(j)), dx,
                  (tolerance_of(s.input) + x_hat_error) * (2.0 + std::abs(dx)))
          << "grad_input " << row << ", " << j;
    }
  }
  if (!c.affine) return;
  const double size = std::sqrt(static_cast<double>(s.rows));
  for (std::int64_t j = 0; j < s.columns; ++j) {
    const auto k = static_cast<std::size_t>(j);
    ASSERT_NEAR(r.grad_weight.get(j), weight_sums[k],
                (tolerance_of(c.params) + x_hat_error) * (4.0 * size + std::abs(weight_sums[k])))
        << "grad_weight " << j;
    ASSERT_NEAR(r.grad_bias.get(j), bias_sums[k],
                tolerance_of(c.params) * (4.0 * size + std::abs(bias_sums[k])))
        << "grad_bias " << j;
  }
}

}  // namespace torchfuse::kernels::testing
