// SPDX-License-Identifier: BSD-3-Clause
// Rows of logits with labels, and their losses and gradients by the formula in fp64.
#pragma once

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kernel_test.h"
#include "kernels/softmax_cross_entropy.h"

namespace torchfuse::kernels::testing {

struct CrossEntropyCase {
  CrossEntropyShape shape;
  double smoothing = 0.0;
  bool ignores = false;
};

inline constexpr std::int64_t kIgnoredLabel = -100;

inline std::string name_of(const CrossEntropyCase& c) {
  return std::to_string(c.shape.rows) + "x" + std::to_string(c.shape.classes) + " dtype " +
         std::to_string(static_cast<int>(c.shape.logits)) + " smoothing " +
         std::to_string(c.smoothing) + (c.ignores ? " ignores" : "");
}

struct CrossEntropyInputs {
  Buffer logits, grad_losses;
  std::vector<std::int64_t> labels;

  /// Normally distributed around `center`.
  explicit CrossEntropyInputs(const CrossEntropyCase& c, std::int64_t offset = 0,
                              double center = 0.0)
      : logits(c.shape.logits, c.shape.rows * c.shape.classes, offset),
        grad_losses(DType::kFloat32, c.shape.rows),
        labels(static_cast<std::size_t>(c.shape.rows)) {
    std::mt19937 random(3);
    logits.fill_normal(random, 3.0);
    for (std::int64_t i = 0; i < logits.numel() && center != 0.0; ++i) {
      logits.set(i, center + logits.get(i));
    }
    grad_losses.fill_normal(random);
    for (std::size_t row = 0; row < labels.size(); ++row) {
      labels[row] = static_cast<std::int64_t>(random() % static_cast<unsigned>(c.shape.classes));
      if (c.ignores && row % 3 == 1) labels[row] = kIgnoredLabel;
    }
  }
};

struct CrossEntropyResults {
  Buffer losses, log_sum_exp, rest, grad_logits;

  explicit CrossEntropyResults(const CrossEntropyCase& c)
      : losses(c.shape.logits == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32, c.shape.rows),
        log_sum_exp(losses.dtype(), c.shape.rows),
        rest(losses.dtype(), c.shape.rows),
        grad_logits(c.shape.logits, c.shape.rows * c.shape.classes) {}

  bool operator==(const CrossEntropyResults& other) const = default;
};

/// The arguments of both passes for inputs and results on the host or on a device.
template <class Inputs, class Results>
CrossEntropyArgs cross_entropy_args(const CrossEntropyCase& c, const Inputs& in, Results& r) {
  CrossEntropyArgs args;
  args.shape = c.shape;
  args.logits = in.logits.data();
  args.labels = {in.labels.data(), c.ignores, kIgnoredLabel};
  args.smoothing = c.smoothing;
  args.losses = {r.losses.data(), r.losses.dtype()};
  args.log_sum_exp = r.log_sum_exp.data();
  args.rest = r.rest.data();
  return args;
}
template <class Inputs, class Results>
CrossEntropyBackwardArgs cross_entropy_backward_args(const CrossEntropyCase& c, const Inputs& in,
                                                     Results& r) {
  CrossEntropyBackwardArgs args;
  args.shape = c.shape;
  args.logits = in.logits.data();
  args.labels = {in.labels.data(), c.ignores, kIgnoredLabel};
  args.smoothing = c.smoothing;
  args.grad_losses = {in.grad_losses.data(), in.grad_losses.dtype()};
  args.log_sum_exp = r.log_sum_exp.data();
  args.rest = r.rest.data();
  args.grad_logits = r.grad_logits.data();
  return args;
}

inline void expect_right(const CrossEntropyCase& c, const CrossEntropyInputs& in,
                         const CrossEntropyResults& r) {
  const auto classes = static_cast<double>(c.shape.classes);
  const bool wide = c.shape.logits == DType::kFloat64;
  const double rounding = wide ? 1e-13 : 2e-6;
  const double stored = wide                                ? 1e-13
                        : c.shape.logits == DType::kFloat32 ? 2e-6
                        : c.shape.logits == DType::kFloat16 ? 1e-3
                                                            : 8e-3;
  for (std::int64_t row = 0; row < c.shape.rows; ++row) {
    const auto x = [&](std::int64_t j) { return in.logits.get(row * c.shape.classes + j); };
    double largest = x(0);
    double mean_below = 0.0;
    double sum = 0.0;
    for (std::int64_t j = 0; j < c.shape.classes; ++j) largest = std::max(largest, x(j));
    for (std::int64_t j = 0; j < c.shape.classes; ++j) sum += std::exp(x(j) - largest);
    for (std::int64_t j = 0; j < c.shape.classes; ++j) {
      mean_below += (x(j) - largest) / classes;
    }
    const double log_sum = std::log(sum);
    const double lse = largest + log_sum;
    const std::int64_t label = in.labels[static_cast<std::size_t>(row)];
    const bool ignored = label == kIgnoredLabel;
    const double smoothed = c.smoothing == 0.0 ? 0.0 : c.smoothing * mean_below;
    const double loss =
        ignored ? 0.0 : log_sum - (1.0 - c.smoothing) * (x(label) - largest) - smoothed;
    ASSERT_NEAR(r.log_sum_exp.get(row), lse, rounding * (1.0 + std::abs(lse)));
    ASSERT_NEAR((r.log_sum_exp.get(row) - largest) + r.rest.get(row), log_sum,
                rounding * (1.0 + log_sum));
    ASSERT_NEAR(r.losses.get(row), loss, rounding * (4.0 + std::abs(loss)));
    const double grad = ignored ? 0.0 : in.grad_losses.get(row);
    for (std::int64_t j = 0; j < c.shape.classes; ++j) {
      const double target = c.smoothing / classes + (j == label ? 1.0 - c.smoothing : 0.0);
      const double dx = ignored ? 0.0 : (std::exp((x(j) - largest) - log_sum) - target) * grad;
      ASSERT_NEAR(r.grad_logits.get(row * c.shape.classes + j), dx, stored * (1.0 + std::abs(grad)))
          << "row " << row << ", class " << j;
    }
  }
}

/// Logits whose size leaves little or nothing of their sum in log_sum_exp.
inline std::vector<std::pair<CrossEntropyCase, double>> cases_of_large_logits() {
  std::vector<std::pair<CrossEntropyCase, double>> all;
  for (const double smoothing : {0.0, 0.1}) {
    for (const double center : {1e3, 1e5, 1e7, 3e38, -3e38}) {
      all.push_back({{{3, 37, DType::kFloat32}, smoothing}, center});
    }
    for (const double center : {1e3, 1e10, 1e300}) {
      all.push_back({{{3, 37, DType::kFloat64}, smoothing}, center});
    }
    all.push_back({{{3, 37, DType::kBFloat16}, smoothing}, 3e38});
  }
  return all;
}

/// A long row whose sums are rounded in the same direction at every element.
inline CrossEntropyInputs logits_of_a_long_row(const CrossEntropyCase& c) {
  CrossEntropyInputs in(c);
  for (std::int64_t j = 0; j < c.shape.classes; ++j) in.logits.set(j, j == 5 ? 1.0 : 0.1);
  return in;
}

/// The loss of logits_of_a_long_row() but for the label, to half of what expect_right() allows.
inline void expect_long_row_right(const CrossEntropyCase& c, const CrossEntropyInputs& in,
                                  const CrossEntropyResults& r) {
  const auto others = static_cast<double>(c.shape.classes - 1);
  const double below = in.logits.get(0) - 1.0;
  const double log_sum = std::log(1.0 + others * std::exp(below));
  ASSERT_NEAR((r.log_sum_exp.get(0) - 1.0) + r.rest.get(0), log_sum, 1e-6);
  const double label_below = in.labels[0] == 5 ? 0.0 : below;
  const double loss =
      log_sum - (1.0 - c.smoothing) * label_below - c.smoothing * below * others / (others + 1.0);
  ASSERT_NEAR(r.losses.get(0), loss, 1e-6);
}

/// Every storage type, with smoothing and ignored rows in turn.
inline std::vector<CrossEntropyCase> cross_entropy_cases(
    const std::vector<std::pair<std::int64_t, std::int64_t>>& shapes) {
  std::vector<CrossEntropyCase> all;
  for (const DType dtype : kEveryDType) {
    for (const auto& [rows, classes] : shapes) {
      all.push_back({{rows, classes, dtype}, all.size() % 2 == 0 ? 0.0 : 0.1, all.size() % 3 == 0});
    }
  }
  return all;
}

}  // namespace torchfuse::kernels::testing
