// SPDX-License-Identifier: BSD-3-Clause
// K1's partials: every element counted once, the same bits always, any magnitude, elements that are
// not finite. Hand-overs: test_last_block.cpp.
#include "kernels/multi_tensor_l2_norm.h"

#include <gtest/gtest.h>

#include <limits>
#include <numeric>

#include "norm_partials.h"

namespace torchfuse::kernels {
namespace {

using namespace testing;

/// For contents from whole_numbers(): nothing is rounded, so the order of additions plays no part.
void expect_exact_sums(const GradientList& list, std::int64_t elements = kNormChunk) {
  const auto partials = partials_of(list, elements);
  const auto expect_exact = [&](const auto& row, auto first, auto stop, std::size_t chunk) {
    double sum = 0.0;
    for (std::int64_t i = first; i < stop; ++i) sum += list.get(row, i) * list.get(row, i);
    ASSERT_EQ(partials[chunk].small, sum) << row.numel << " elements from " << first;
    ASSERT_EQ(partials[chunk].big, 0.0) << row.numel << " elements from " << first;
    ASSERT_EQ(partials[chunk].nonfinite, 0u) << row.numel << " elements from " << first;
  };
  for_each_chunk(list, expect_exact, elements);
}

/// Load instructions for a row: vectors in the widest accesses that its address allows, then the
/// elements behind them.
std::size_t expected_loads(const GradientList& list, const GradientList::Row& row) {
  const auto size = static_cast<std::int64_t>(size_of(list.dtype()));
  const auto address =
      reinterpret_cast<std::uintptr_t>(list.device()[row.memory].data()) + row.begin * size;
  std::uintptr_t width = 16;
  while (address % width != 0) width /= 2;
  std::size_t loads = 0;
  for (std::int64_t first = 0; first < row.numel; first += kNormChunk) {
    const std::int64_t count = std::min(kNormChunk, row.numel - first);
    const std::int64_t vec = elements_per_vector(list.dtype());
    loads += static_cast<std::size_t>(count / vec) * (16 / width) +
             static_cast<std::size_t>(count % vec);
  }
  return loads;
}

TEST(CudaL2Norm, SmallListsHaveExactSums) {
  std::mt19937 random(1);
  for (const DType dtype : kEveryDType) {
    GradientList list(dtype);
    for (const std::int64_t numel : {1, 511, 0, 513, 7, 16387}) {
      list.add(whole_numbers(dtype, numel, random), 1);
    }
    for (const std::uint64_t seed : {0, 1, 2}) {
      set_order_for(dtype, seed);
      expect_exact_sums(list);
    }
  }
}

TEST(CudaL2Norm, EverySizeAtEveryMisalignmentHasExactSums) {
  std::mt19937 random(2);
  for (const DType dtype : kEveryDType) {
    for (std::int64_t offset = 0; offset < elements_per_vector(dtype); ++offset) {
      SCOPED_TRACE(::testing::Message() << "dtype " << int(dtype) << ", offset " << offset);
      GradientList list(dtype);
      for (const std::int64_t numel : border_sizes(kNormChunk)) {
        const bool odd = list.rows().size() % 2 != 0;
        list.add(whole_numbers(dtype, numel, random), offset,
                 odd ? GradientList::Guard::kBegin : GradientList::Guard::kEnd);
      }
      set_order_for(dtype, static_cast<std::uint64_t>(offset));
      expect_exact_sums(list);
      for (const GradientList::Row& row : list.rows()) {
        if (!accesses_are_counted()) continue;
        ASSERT_EQ(list.device()[row.memory].loads(), expected_loads(list, row)) << row.numel;
      }
    }
  }
}

TEST(CudaL2Norm, ChunksOfEverySizeHaveExactSums) {
  std::mt19937 random(7);
  for (const DType dtype : kEveryDType) {
    for (const std::int64_t elements : {2048, 4096, 8192}) {
      GradientList list(dtype);
      for (const std::int64_t numel : border_sizes(elements)) {
        list.add(whole_numbers(dtype, numel, random), 1);
      }
      set_order_for(dtype, 1);
      expect_exact_sums(list, elements);
    }
  }
}

// Two blocks for each multiprocessor of the largest GPUs, as long as chunks are larger than the
// least.
static_assert(norm_chunk_on_cuda(0) == 2048);
static_assert(norm_chunk_on_cuda(512 * 4096 - 1) == 2048);
static_assert(norm_chunk_on_cuda(512 * 4096) == 4096);
static_assert(norm_chunk_on_cuda(512 * 8192) == 8192);
static_assert(norm_chunk_on_cuda(512 * kNormChunk - 1) == 8192);
static_assert(norm_chunk_on_cuda(512 * kNormChunk) == kNormChunk);
static_assert(norm_chunk_on_cuda(std::int64_t{1} << 40) == kNormChunk);

TEST(CudaL2Norm, ListsOfEveryLengthHaveExactSums) {
  for_each_length(3, [](const GradientList& list) { expect_exact_sums(list); });
}

/// A tensor of each kind, with contents that round.
std::vector<Buffer> rounding_contents(DType dtype) {
  std::mt19937 random(5);
  std::vector<Buffer> contents;
  for (const std::int64_t numel : {300, 2001, 16384 + 77}) {
    contents.emplace_back(dtype, numel);
    contents.back().fill_normal(random);
    contents.back().set(numel / 2, largest(dtype) / 8);
  }
  return contents;
}

/// The partials of the tensors at the given places of the list, one after the other.
std::vector<NormPartial> partials_at(const GradientList& list,
                                     const std::vector<std::size_t>& places) {
  const auto all = partials_of(list);
  const auto chunk_offsets = list.chunk_offsets();
  std::vector<NormPartial> result;
  for (const std::size_t place : places) {
    for (std::int64_t chunk = chunk_offsets[place]; chunk < chunk_offsets[place + 1]; ++chunk) {
      result.push_back(all[static_cast<std::size_t>(chunk)]);
    }
  }
  return result;
}

TEST(CudaL2Norm, SmallListsGiveTheSameBitsInAnyOrderOfExecution) {
  for (const DType dtype : kEveryDType) {
    GradientList list(dtype);
    for (const Buffer& content : rounding_contents(dtype)) list.add(content);
    set_order_for(dtype, 0, 1);
    const auto expected = partials_of(list);
    for (const std::uint32_t resident : {1, 2, 4}) {
      set_order_for(dtype, 10 + resident, resident);
      EXPECT_TRUE(same_bits(partials_of(list), expected));
    }
  }
}

TEST(CudaL2Norm, ATensorHasTheSameBitsAtAnyAddressAndPlace) {
  std::mt19937 random(6);
  for (const DType dtype : kEveryDType) {
    const auto contents = rounding_contents(dtype);
    GradientList alone(dtype);
    for (const Buffer& content : contents) alone.add(content);
    set_order_for(dtype, 0);
    const auto expected = partials_of(alone);
    for (std::int64_t offset = 1; offset < elements_per_vector(dtype); ++offset) {
      GradientList shifted(dtype);
      for (const Buffer& content : contents) shifted.add(content, offset);
      EXPECT_TRUE(same_bits(partials_of(shifted), expected));
    }
    if (dtype == DType::kFloat16 || dtype == DType::kBFloat16) continue;
    // Among many others, in a later launch, and in another order.
    GradientList crowd(dtype);
    crowd.add_packed(whole_numbers(dtype, 1100, random), std::vector<std::int64_t>(1100, 1));
    for (const Buffer& content : contents) crowd.add(content, 1);
    set_order_for(dtype, 3, 4);
    EXPECT_TRUE(same_bits(partials_at(crowd, {1100, 1101, 1102}), expected));
    std::vector<std::size_t> backwards(1103);
    std::iota(backwards.rbegin(), backwards.rend(), std::size_t{0});
    crowd.reorder(backwards);
    EXPECT_TRUE(same_bits(partials_at(crowd, {2, 1, 0}), expected));
  }
}

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

TEST(CudaL2Norm, SumsOfAnyMagnitudeStayWithinTheBound) {
  std::mt19937 random(4);
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
    for (const double scale : {1.0, 1e-3, 300.0}) {
      list.add(normal_numbers(dtype, 3 * kNormChunk + 17, random, scale));
    }
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
