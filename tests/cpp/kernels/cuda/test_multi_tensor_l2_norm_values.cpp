// SPDX-License-Identifier: BSD-3-Clause
// K1's partials: rounding, magnitudes, elements that are not finite.
#include "kernels/multi_tensor_l2_norm.h"

#include <gtest/gtest.h>

#include <limits>

#include "norm_partials.h"

namespace torchfuse::kernels {
namespace {

using namespace testing;

/// A thread adds at most 65 squares, and the sums of a block's threads are rounded 13 times more,
/// in fp64. Squares and sums below the smallest normal number may vanish. The expected sums
/// themselves carry the rounding of 16,384 additions.
void expect_sums_within_the_bound(const GradientList& list) {
  const bool fp64 = list.dtype() == DType::kFloat64;
  const long double unit = fp64 ? 0x1p-53L : 0x1p-24L;
  const long double relative = 66 * unit + 13 * 0x1p-53L + 16384 * 0x1p-64L;
  const long double lost = fp64 ? 0x1p-1074L : 0x1p-126L;
  const long double threshold = fp64 ? 0x1p500L : 0x1p58L;
  const auto partials = partials_of(list);
  for_each_chunk(list, [&](const auto& row, auto first, auto stop, std::size_t chunk) {
    long double small = 0.0L;
    long double big = 0.0L;
    for (std::int64_t i = first; i < stop; ++i) {
      const auto x = static_cast<long double>(list.get(row, i));
      if (std::abs(x) < threshold || !fp64) {
        small += x * x;
      } else {
        big += x * 0x1p-600L * (x * 0x1p-600L);
      }
    }
    const long double floor = lost * static_cast<long double>(stop - first);
    ASSERT_LE(std::abs(partials[chunk].small - small), relative * small + floor)
        << "chunk " << chunk;
    ASSERT_LE(std::abs(partials[chunk].big - big), relative * big) << "chunk " << chunk;
    ASSERT_EQ(partials[chunk].nonfinite, 0u) << "chunk " << chunk;
  });
}

TEST(CudaL2Norm, RoundedSumsStayWithinTheBound) {
  std::mt19937 random(4);
  for (const DType dtype : kEveryDType) {
    GradientList list(dtype);
    for (const double scale : {1.0, 1e-3, 300.0}) {
      Buffer content(dtype, 3 * kNormChunk + 17);
      content.fill_normal(random, scale);
      list.add(content);
    }
    set_order_for(dtype, 1);
    expect_sums_within_the_bound(list);
  }
}

TEST(CudaL2Norm, ElementsOfAnyMagnitudeNeitherOverflowNorHideOthers) {
  for (const DType dtype : kEveryDType) {
    const bool wide = dtype == DType::kFloat64;
    const double threshold = wide ? 0x1p500 : 0x1p58;
    std::vector<double> magnitudes{largest(dtype), 1e-4};
    if (dtype != DType::kFloat16) {
      for (const double near : {0x0.ffp0, 1.0, 0x1.02p0}) magnitudes.push_back(near * threshold);
      for (const double x : {3e38, 1e18, 1e-18, 1e-30}) magnitudes.push_back(x);
    }
    if (wide) magnitudes.insert(magnitudes.end(), {1e300, 1e150, 1e-150, 1e-300});
    GradientList list(dtype);
    Buffer mixed(dtype, kNormChunk);
    for (const double x : magnitudes) {
      Buffer content(dtype, kNormChunk + 300);
      for (std::int64_t i = 0; i < content.numel(); ++i) content.set(i, i % 2 == 0 ? x : -x);
      list.add(content);
    }
    for (std::int64_t i = 0; i < mixed.numel(); ++i) {
      mixed.set(i, magnitudes[static_cast<std::size_t>(i) % magnitudes.size()]);
    }
    list.add(mixed, 1);
    set_order_for(dtype, 2);
    expect_sums_within_the_bound(list);
  }
}

/// The first and last elements of tensor, vectors, chunks and tail.
std::vector<std::int64_t> edges(std::int64_t numel, std::int64_t vec) {
  std::vector<std::int64_t> all;
  const std::int64_t tail = numel / vec * vec;
  for (const std::int64_t border : {std::int64_t{0}, vec, 32 * vec, 256 * vec, 1024 * vec,
                                    kNormChunk, 2 * kNormChunk, tail, numel}) {
    for (const std::int64_t at : {border - 1, border}) {
      if (at >= 0 && at < numel) all.push_back(at);
    }
  }
  return all;
}

TEST(CudaL2Norm, FindsANonFiniteElementAtEveryEdgeAndFlagsItsSlotAlone) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  std::size_t next = 0;
  for (const DType dtype : kEveryDType) {
    for (const std::int64_t offset : {0, 1}) {
      GradientList list(dtype);
      for (const std::int64_t numel : {1, 9, 500, 517, 2 * 16384 + 21}) {
        for (const std::int64_t at : edges(numel, elements_per_vector(dtype))) {
          Buffer content(dtype, numel);
          content.set(at, std::vector{kInfinity, -kInfinity, std::nan("")}[next++ % 3]);
          list.add(content, offset);
        }
      }
      set_order_for(dtype, next);
      const auto partials = partials_of(list);
      for_each_chunk(list, [&](const auto& row, auto first, auto stop, std::size_t chunk) {
        bool nonfinite = false;
        for (std::int64_t i = first; i < stop; ++i) nonfinite |= !std::isfinite(list.get(row, i));
        ASSERT_EQ(partials[chunk].nonfinite, nonfinite ? 1u : 0u)
            << row.numel << " elements from " << first;
      });
    }
  }
}

}  // namespace
}  // namespace torchfuse::kernels
