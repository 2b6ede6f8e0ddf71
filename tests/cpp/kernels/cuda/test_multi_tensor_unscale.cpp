// SPDX-License-Identifier: BSD-3-Clause
// Unscaling gives the bits of the CPU driver, which has tests of its own.
#include "kernels/multi_tensor_unscale.h"

#include <gtest/gtest.h>

#include <limits>

#include "gradient_list.h"

namespace torchfuse::kernels {
namespace {

using namespace testing;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// The flag and the gradients that one launch leaves.
struct Result {
  float found_inf;
  std::vector<Buffer> memory;
};

/// Every element must be read once and written once.
Result unscale(const GradientList& list, float inv_scale, float found_before) {
  list.upload();
  const Rows rows = list.device_rows();
  const DeviceArray<float> scale({inv_scale});
  const DeviceArray<float> found({found_before});
  expect_ok(multi_tensor_unscale_cuda({list.table(rows), scale.data(), found.data()}, stream()));
  list.expect_accesses(1, 1);
  for (const DeviceArray<float>* flag : {&scale, &found}) flag->expect_margins_intact();
  EXPECT_TRUE(same_value(scale.to_host()[0], inv_scale));
  Result result{found.to_host()[0], {}};
  for (const DeviceTensor& tensor : list.device()) result.memory.push_back(tensor.to_host());
  return result;
}

Result unscale_on_cpu(const GradientList& list, float inv_scale, float found_before) {
  Result result{found_before, list.host()};
  const Rows rows = list.rows_in(result.memory);
  const UnscaleArgs args{list.table(rows), &inv_scale, nullptr};
  if (multi_tensor_unscale_cpu(detect_cpu_isa(), args, 0, rows.offsets.back())) {
    result.found_inf = 1.0f;
  }
  return result;
}

void expect_the_cpus_bits(const GradientList& list, float inv_scale, float found_before = 0.0f) {
  const Result actual = unscale(list, inv_scale, found_before);
  const Result expected = unscale_on_cpu(list, inv_scale, found_before);
  EXPECT_TRUE(same_value(actual.found_inf, expected.found_inf)) << actual.found_inf;
  for (std::size_t m = 0; m < expected.memory.size(); ++m) {
    for (std::int64_t i = 0; i < expected.memory[m].numel(); ++i) {
      ASSERT_TRUE(same_value(actual.memory[m].get(i), expected.memory[m].get(i)))
          << "element " << i << " of " << expected.memory[m].numel() << " in allocation " << m
          << ": " << actual.memory[m].get(i) << " for " << list.host()[m].get(i) << " x "
          << inv_scale << ", on the CPU " << expected.memory[m].get(i);
    }
  }
}

/// Elements of a chunk in short lists: one vector for each thread of a block.
std::int64_t smallest_chunk(DType dtype) { return 256 * elements_per_vector(dtype); }

/// Load instructions for a tensor: in each chunk the elements up to the first 16-byte boundary, the
/// vectors, and the elements behind them. There are as many stores.
std::size_t expected_accesses(std::int64_t numel, std::int64_t offset, DType dtype) {
  const std::int64_t vec = elements_per_vector(dtype);
  std::int64_t accesses = 0;
  // A tensor that one warp handles is all one chunk.
  const std::int64_t chunk = numel <= 512 ? 512 : smallest_chunk(dtype);
  for (std::int64_t first = 0; first < numel; first += chunk) {
    const std::int64_t count = std::min(chunk, numel - first);
    const std::int64_t head = std::min((vec - offset) % vec, count);
    accesses += head + (count - head) / vec + (count - head) % vec;
  }
  return static_cast<std::size_t>(accesses);
}

TEST(CudaUnscale, SmallListsHaveTheCpusBits) {
  std::mt19937 random(1);
  for (const DType dtype : kEveryDType) {
    GradientList list(dtype);
    for (const std::int64_t numel : {1, 511, 0, 513, 7, 5003}) {
      list.add(normal_numbers(dtype, numel, random), 1);
    }
    for (const std::uint32_t resident : {1, 2, 4}) {
      set_order_for(dtype, resident, resident);
      expect_the_cpus_bits(list, 0.3f);
    }
  }
}

TEST(CudaUnscale, EverySizeAtEveryMisalignmentHasTheCpusBits) {
  std::mt19937 random(2);
  for (const DType dtype : kEveryDType) {
    for (std::int64_t offset = 0; offset < elements_per_vector(dtype); ++offset) {
      SCOPED_TRACE(::testing::Message() << "dtype " << int(dtype) << ", offset " << offset);
      GradientList list(dtype);
      for (const std::int64_t numel : border_sizes(smallest_chunk(dtype))) {
        const bool odd = list.rows().size() % 2 != 0;
        list.add(normal_numbers(dtype, numel, random), offset,
                 odd ? GradientList::Guard::kBegin : GradientList::Guard::kEnd);
      }
      set_order_for(dtype, static_cast<std::uint64_t>(offset));
      expect_the_cpus_bits(list, 0.3f);
      for (const DeviceTensor& tensor : list.device()) {
        if (!accesses_are_counted()) continue;
        const std::size_t expected = expected_accesses(tensor.numel(), offset, dtype);
        ASSERT_EQ(tensor.loads(), expected) << tensor.numel();
        ASSERT_EQ(tensor.stores(), expected) << tensor.numel();
      }
    }
  }
}

TEST(CudaUnscale, ListsOfEveryLengthHaveTheCpusBits) {
  for_each_length(3, [](const GradientList& list) { expect_the_cpus_bits(list, 0x1.234p-7f); });
}

/// Numbers on both sides of every limit that arithmetic and formats have.
std::vector<double> edge_numbers(DType dtype) {
  std::vector<double> positive{0.0,          1.0,          65504.0,      6.1e-5,
                               0x1p-24,      0x1p-25,      1e-4,         0x1.fffffep127,
                               0x1p-126,     0x1p-127,     0x1p-149,     3e-38,
                               1.0 + 0x1p-8, 1.0 + 0x1p-9, 1.0 + 0x3p-9, 1.0 + 0x1p-11,
                               1.0 + 0x1p-10};
  if (dtype == DType::kFloat64) positive.insert(positive.end(), {1e300, 1e-300, 5e-324});
  std::vector<double> numbers;
  for (const double x : positive) numbers.insert(numbers.end(), {x, -x});
  return numbers;
}

TEST(CudaUnscale, EveryScaleHasTheCpusBits) {
  for (const DType dtype : kEveryDType) {
    Buffer content(dtype, 600);
    const auto numbers = edge_numbers(dtype);
    for (std::int64_t i = 0; i < content.numel(); ++i) {
      content.set(i, numbers[static_cast<std::size_t>(i) % numbers.size()]);
    }
    GradientList list(dtype);
    list.add(content, 1);
    set_order_for(dtype, 4);
    for (const float inv_scale :
         {1.0f, 0x1p-16f, 0.3f, 0x1p-126f, 0x1p127f, 3e38f, 0.0f, -0.0f, -2.0f, kInfinity,
          -kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
      expect_the_cpus_bits(list, inv_scale);
    }
    // A scale that fp32 arithmetic flushes.
    if (dtype != DType::kFloat64) expect_the_cpus_bits(list, 0x1p-140f);
  }
}

TEST(CudaUnscale, EveryEncodingHasTheCpusBits) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    Buffer all(dtype, 65536);
    for (std::int64_t i = 0; i < all.numel(); ++i) {
      const auto bits = static_cast<std::uint16_t>(i);
      std::memcpy(static_cast<char*>(all.data()) + 2 * i, &bits, sizeof bits);
    }
    GradientList list(dtype);
    list.add(all);     // in pairs
    list.add(all, 1);  // the same, in other pairs and some by themselves
    set_order_for(dtype, 5);
    for (const float inv_scale : {1.0f, 1.001953125f, 0.99609375f, 3e-5f, 0.3f, 7.0f}) {
      expect_the_cpus_bits(list, inv_scale);
    }
  }
}

/// The first and last elements of tensor, head, vectors, tail and chunks.
std::vector<std::int64_t> edges(std::int64_t numel, std::int64_t head, DType dtype) {
  const std::int64_t vec = elements_per_vector(dtype);
  const std::int64_t chunk = smallest_chunk(dtype);
  const std::int64_t behind = head < numel ? numel - (numel - head) % vec : numel;
  std::vector<std::int64_t> all;
  for (const std::int64_t border : {std::int64_t{0}, head, head + vec, head + 32 * vec, behind,
                                    chunk, chunk + head, 2 * chunk, 2 * chunk + head, numel}) {
    for (const std::int64_t at : {border - 1, border}) {
      if (at >= 0 && at < numel) all.push_back(at);
    }
  }
  return all;
}

TEST(CudaUnscale, AnElementAtAnyEdgeRaisesTheFlag) {
  std::size_t next = 0;
  for (const DType dtype : kEveryDType) {
    for (const std::int64_t offset : {0, 1}) {
      const std::int64_t head = offset == 0 ? 0 : elements_per_vector(dtype) - 1;
      for (const std::int64_t numel :
           {std::int64_t{1}, std::int64_t{300}, 2 * smallest_chunk(dtype) + 21}) {
        for (const std::int64_t at : edges(numel, head, dtype)) {
          Buffer content(dtype, numel);
          const float value = std::vector{kInfinity, -kInfinity, std::nanf("")}[next++ % 3];
          content.set(at, static_cast<double>(value));
          GradientList list(dtype);
          list.add(content, offset);
          set_order_for(dtype, next);
          ASSERT_EQ(unscale(list, 0.5f, 0.0f).found_inf, 1.0f)
              << value << " at " << at << " of " << numel;
        }
      }
    }
  }
}

TEST(CudaUnscale, SmallListsNeverClearTheFlag) {
  for (const DType dtype : kEveryDType) {
    std::mt19937 random(6);
    GradientList finite(dtype);
    finite.add(normal_numbers(dtype, 2000, random), 1);
    Buffer all_infinite(dtype, 2000);
    for (std::int64_t i = 0; i < 2000; ++i) all_infinite.set(i, static_cast<double>(kInfinity));
    GradientList infinite(dtype);
    infinite.add(all_infinite, 1);
    for (const float before : {0.0f, 1.0f, 2.0f, std::nanf("")}) {
      set_order_for(dtype, 7);
      // The products of finite elements may overflow: that is the scale's fault.
      EXPECT_TRUE(same_value(unscale(finite, 1e38f, before).found_inf, before));
      EXPECT_EQ(unscale(infinite, 0.5f, before).found_inf, 1.0f);
    }
  }
}

TEST(CudaUnscale, ListsWithoutElementsDoNothing) {
  GradientList empty(DType::kFloat32);
  expect_the_cpus_bits(empty, 0.5f);
  for (int i = 0; i < 20; ++i) empty.add(Buffer(DType::kFloat32, 0));
  expect_the_cpus_bits(empty, 0.5f);
}

TEST(CudaUnscale, ReportsALaunchThatIsRefusedOnce) {
  std::mt19937 random(8);
  GradientList list(DType::kFloat32);
  list.add(normal_numbers(DType::kFloat32, 100, random));
  Rows rows;
  rows.add({.grad = nullptr, .numel = std::int64_t{1} << 45});  // 2^31 blocks
  expect_refused(multi_tensor_unscale_cuda({list.table(rows), nullptr, nullptr}, stream()),
                 "launch of multi_tensor_unscale_kernel");
  set_order({});
  expect_the_cpus_bits(list, 0.5f);
  const Rows small = list.device_rows();
  TensorTable table = list.table(small);
  table.grad = static_cast<DType>(9);
  expect_refused(multi_tensor_unscale_cuda({table, nullptr, nullptr}, stream()),
                 "gradient dtype of multi_tensor_unscale");
}

}  // namespace
}  // namespace torchfuse::kernels
