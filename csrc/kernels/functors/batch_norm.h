// SPDX-License-Identifier: BSD-3-Clause
// Batch normalization of one channel: the sums, the data that ranks exchange, and the terms that
// every element uses.
//
// Note [Moments that add up]
// Ranks exchange sums, so that one all-reduce combines any number of ranks, and an empty rank
// contributes zeros. The variance is a difference of sums: the sum of squares minus the squared
// sum. This difference loses 2 log2(mean / sigma) bits, which is half of a double's bits if the
// mean is 1e4 sigma. Therefore both sums are sent in two parts: the leading 24 bits and the rest.
// Leading parts of similar size add without rounding. If a rank's sum is so small that the last
// bits are lost, the ranks' means differ so much that the variance does not need these bits. In
// total 77 bits are added: the combined variance is as exact as each rank's variance for means up
// to 1e6 sigma, and hardly depends on the ranks' order.
//
// Note [Two-part mean]
// Near a large mean, the spacing of floats is a visible part of sigma. x - center is exact there,
// where center is the mean rounded to float. The mean's rounding error goes into the constant term,
// which is computed in fp64.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/common/dtype.h"
#include "kernels/common/float16.h"
#include "kernels/common/macros.h"
#include "kernels/common/math.h"

namespace torchfuse::kernels {

/// One channel's count, mean and sum of squared deviations.
struct Moments {
  double count = 0.0;
  double mean = 0.0;
  double m2 = 0.0;
};

/// Sums of x - pivot and (x - pivot)^2 over `count` elements.
struct PivotedSums {
  double pivot = 0.0;
  double sum = 0.0;
  double sum_sq = 0.0;
  double count = 0.0;
};

/// Merges `b` into `a`, about a's pivot. Pivots are channel elements, so the shift's loss of
/// precision is bounded by a few sigma.
TORCHFUSE_HOST_DEVICE PivotedSums merge(const PivotedSums& a, const PivotedSums& b) {
  if (a.count == 0.0) return b;
  if (b.count == 0.0) return a;
  const double shift = b.pivot - a.pivot;
  return PivotedSums{a.pivot, a.sum + (b.sum + b.count * shift),
                     a.sum_sq + (b.sum_sq + shift * (2.0 * b.sum + b.count * shift)),
                     a.count + b.count};
}

TORCHFUSE_HOST_DEVICE Moments moments_of(const PivotedSums& sums) {
  if (sums.count == 0.0) return Moments{};
  const double offset = sums.sum / sums.count;
  const double m2 = sums.sum_sq - sums.sum * offset;
  return Moments{sums.count, sums.pivot + offset, m2 < 0.0 ? 0.0 : m2};
}

/// a + b or a * b without rounding error, as value and remainder (Dekker; Knuth).
struct TwoPart {
  double value;
  double rest;
};
TORCHFUSE_HOST_DEVICE TwoPart exact_sum(double a, double b) {
  const double sum = a + b;
  const double b_part = sum - a;
  return TwoPart{sum, (a - (sum - b_part)) + (b - b_part)};
}
TORCHFUSE_HOST_DEVICE TwoPart exact_product(double a, double b) {
  const double product = a * b;
  return TwoPart{product, kernels::fma(a, b, -product)};
}

/// Returns a double's leading 24 bits.
TORCHFUSE_HOST_DEVICE double leading_bits(double x) {
  std::uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  bits &= ~((std::uint64_t{1} << 29) - 1);
  memcpy(&x, &bits, sizeof bits);
  return x;
}

/// Number of doubles in which ranks exchange the moments of `channels` channels: sum and sum of
/// squares in two parts each, and the element count per channel. See Note [Moments that add up].
TORCHFUSE_HOST_DEVICE constexpr std::int64_t packed_moments_size(std::int64_t channels) {
  return 4 * channels + 1;
}

/// Writes channel `c`. The caller writes the count, packed[4 * channels], once.
TORCHFUSE_HOST_DEVICE void pack_moments(const Moments& moments, double* packed, std::int64_t c,
                                        std::int64_t channels) {
  const TwoPart sum = exact_product(moments.count, moments.mean);
  const TwoPart square = exact_product(sum.value, moments.mean);
  const TwoPart sum_sq = exact_sum(square.value, moments.m2);
  const double sum_lead = leading_bits(sum.value);
  const double sum_sq_lead = leading_bits(sum_sq.value);
  packed[c] = sum_lead;
  packed[channels + c] = (sum.value - sum_lead) + sum.rest;
  packed[2 * channels + c] = sum_sq_lead;
  packed[3 * channels + c] =
      (sum_sq.value - sum_sq_lead) + (sum_sq.rest + (square.rest + sum.rest * moments.mean));
}

TORCHFUSE_HOST_DEVICE Moments unpack_moments(const double* packed, std::int64_t c,
                                             std::int64_t channels) {
  const double count = packed[4 * channels];
  if (count == 0.0) return Moments{};
  const TwoPart sum = exact_sum(packed[c], packed[channels + c]);
  const TwoPart sum_sq = exact_sum(packed[2 * channels + c], packed[3 * channels + c]);
  const double mean = sum.value / count;
  // m2 = sum_sq - mean * (2 * sum - count * mean), in two parts throughout.
  const TwoPart total = exact_product(count, mean);
  const TwoPart twice = exact_sum(2.0 * sum.value, -total.value);
  const double twice_rest = twice.rest + (2.0 * sum.rest - total.rest);
  const TwoPart square = exact_product(mean, twice.value);
  const TwoPart m2 = exact_sum(sum_sq.value, -square.value);
  const double value = m2.value + (m2.rest + (sum_sq.rest - (square.rest + mean * twice_rest)));
  return Moments{count, mean, value < 0.0 ? 0.0 : value};
}

/// A channel's terms for the output: y = (x - center) * scale + shift.
template <class T>
struct NormalizeTerms {
  T center;
  T scale;
  T shift;
};

template <class T>
TORCHFUSE_HOST_DEVICE NormalizeTerms<T> normalize_terms(double mean, double invstd, double weight,
                                                        double bias) {
  const T center = static_cast<T>(mean);
  const double scale = weight * invstd;
  return NormalizeTerms<T>{center, static_cast<T>(scale),
                           static_cast<T>(bias - (mean - static_cast<double>(center)) * scale)};
}

/// `deviation` is x - center.
template <class V>
TORCHFUSE_HOST_DEVICE V normalize(V deviation, V scale, V shift) {
  return fma(deviation, scale, shift);
}

/// Gradients of bias and weight, and also the sums that ranks exchange: dy and dy * x_hat.
struct GradSums {
  double dy = 0.0;
  double dy_xhat = 0.0;
};

/// Computes the sums from those over dy and dy * (x - center), where center is the mean as a T.
template <class T>
TORCHFUSE_HOST_DEVICE GradSums grad_sums(double dy, double dy_deviation, double mean,
                                         double invstd) {
  const double rest = mean - static_cast<double>(static_cast<T>(mean));
  return GradSums{dy, (dy_deviation - rest * dy) * invstd};
}

/// dx = dy * dy_scale + (x - center) * deviation_scale + constant.
template <class T>
struct GradInputTerms {
  T dy_scale;
  T deviation_scale;
  T constant;
};

/// A `count` of 0 means that the statistics do not depend on the input.
template <class T>
TORCHFUSE_HOST_DEVICE GradInputTerms<T> grad_input_terms(double mean, double invstd, double weight,
                                                         const GradSums& sums, double count) {
  const double rest = mean - static_cast<double>(static_cast<T>(mean));
  const double dy_scale = weight * invstd;
  const double per_element = count == 0.0 ? 0.0 : dy_scale / count;
  const double deviation_scale = -per_element * sums.dy_xhat * invstd;
  return GradInputTerms<T>{static_cast<T>(dy_scale), static_cast<T>(deviation_scale),
                           static_cast<T>(-per_element * sums.dy - deviation_scale * rest)};
}

template <class V>
TORCHFUSE_HOST_DEVICE V grad_input(V dy, V deviation, V dy_scale, V deviation_scale, V constant) {
  return fma(dy, dy_scale, fma(deviation, deviation_scale, constant));
}

/// 1 / sqrt(biased variance + eps).
TORCHFUSE_HOST_DEVICE double inverse_std(double variance, double eps) {
  return 1.0 / kernels::sqrt(variance + eps);
}

TORCHFUSE_HOST_DEVICE double biased_variance(const Moments& moments) {
  return moments.count == 0.0 ? 0.0 : moments.m2 / moments.count;
}

/// Running variances are unbiased, as in torch. A single element has variance 0.
TORCHFUSE_HOST_DEVICE double unbiased_variance(const Moments& moments) {
  return moments.count <= 1.0 ? 0.0 : moments.m2 / (moments.count - 1.0);
}

/// (1 - factor) * running + factor * observed.
TORCHFUSE_HOST_DEVICE double running_average(double running, double observed, double factor) {
  return (1.0 - factor) * running + factor * observed;
}

}  // namespace torchfuse::kernels
