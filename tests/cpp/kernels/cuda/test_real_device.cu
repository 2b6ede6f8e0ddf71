// SPDX-License-Identifier: BSD-3-Clause
// What only a GPU can answer: how it rounds around the smallest normal number, how good its
// approximations are, and whether compute-sanitizer finds a fault that is there.
//
// TORCHFUSE_PLANTED_FAULT=out_of_bounds or missing_barrier puts that fault into the kernel below.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <numeric>
#include <string>
#include <vector>

#include "device.h"
#include "kernels/common/float16.h"
#include "kernels/common/math.h"
#include "kernels/cuda/lanes.cuh"

namespace torchfuse::kernels::testing {
namespace {

constexpr int kThreads = 256;

struct PlantedFault {
  bool out_of_bounds;
  bool missing_barrier;
};

PlantedFault planted_fault() {
  const char* value = std::getenv("TORCHFUSE_PLANTED_FAULT");
  const std::string name = value == nullptr ? "" : value;
  return {name == "out_of_bounds", name == "missing_barrier"};
}

/// One block adds kThreads values in shared memory.
__global__ void block_sum(const float* values, float* sum, PlantedFault fault) {
  __shared__ float parts[kThreads];
  const unsigned thread = threadIdx.x;
  parts[thread] = values[thread + (fault.out_of_bounds ? 1 : 0)];
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    if (!fault.missing_barrier) __syncthreads();
    if (thread < half) parts[thread] += parts[thread + half];
  }
  if (thread == 0) *sum = parts[0];
}

TEST(CudaBlockSumSanitizer, AddsAllValues) {
  std::vector<float> values(kThreads);
  std::iota(values.begin(), values.end(), 0.0f);
  const DeviceArray<float> device_values(values);
  const auto sum = DeviceArray<float>::unwritten(1);
  const PlantedFault fault = planted_fault();
  block_sum<<<1, kThreads, 0, stream()>>>(device_values.data(), sum.data(), fault);
  ASSERT_EQ(cudaGetLastError(), cudaSuccess);
  synchronize();
  if (fault.out_of_bounds || fault.missing_barrier) return;  // the sum may be any number
  EXPECT_EQ(sum.to_host()[0], kThreads * (kThreads - 1) / 2.0f);
}

__global__ void round_each(const double* values, float* rounded, int count) {
  for (int i = 0; i < count; ++i) rounded[i] = round_to<float>(values[i]);
}

__global__ void multiply(const float* factors, float* product) {
  *product = factors[0] * factors[1];
}

constexpr float kSmallestNormal = 0x1p-126f;

// Numbers between these two are below the smallest normal number, and round to it.
constexpr double kHalfWay = 0x1p-126 * (1.0 - 0x1p-25);
constexpr double kBelow = 0x1.fffffffffffffp-127;
// Half a unit of the denormal numbers below it: rounds up to it where those are rounded to first.
constexpr double kHalfADenormal = 0x1p-126 * (1.0 - 0x1p-24);

/// What becomes of such numbers is not promised, but recorded: docs/numerics.md.
void record(const char* name, float result) {
  EXPECT_TRUE(result == 0.0f || result == kSmallestNormal) << result;
  ::testing::Test::RecordProperty(name, result == 0.0f ? "0" : "2^-126");
}

TEST(CudaRounding, OfFp64NearTheSmallestNormalNumber) {
  const std::vector<double> values{kBelow,         kHalfWay,  std::nextafter(kHalfWay, 0.0),
                                   kHalfADenormal, 0x1p-126,  -0x1p-126,
                                   0x1.8p-127,     -0x1p-130, 1.0 / 3.0};
  const DeviceArray<double> device_values(values);
  const auto rounded = DeviceArray<float>::unwritten(static_cast<std::int64_t>(values.size()));
  round_each<<<1, 1, 0, stream()>>>(device_values.data(), rounded.data(),
                                    static_cast<int>(values.size()));
  ASSERT_EQ(cudaGetLastError(), cudaSuccess);
  synchronize();
  const std::vector<float> results = rounded.to_host();
  record("fp64_below_2^-126", results[0]);
  record("fp64_half_way_below_2^-126", results[1]);
  record("fp64_less_than_half_way_below_2^-126", results[2]);
  record("fp64_half_a_denormal_below_2^-126", results[3]);
  for (std::size_t i = 4; i < values.size(); ++i) {
    const float expected = round_to<float>(values[i]);
    EXPECT_EQ(std::signbit(results[i]), std::signbit(expected)) << values[i];
    EXPECT_EQ(results[i], expected) << values[i];
  }
}

TEST(CudaRounding, OfAProductNearTheSmallestNormalNumber) {
  // 2^-126 (1 - 2^-46), which rounds to 2^-126.
  const DeviceArray<float> factors({0x1.000002p-60f, 0x1.fffffcp-67f});
  const auto product = DeviceArray<float>::unwritten(1);
  multiply<<<1, 1, 0, stream()>>>(factors.data(), product.data());
  ASSERT_EQ(cudaGetLastError(), cudaSuccess);
  synchronize();
  record("fp32_product_below_2^-126", product.to_host()[0]);
}

constexpr int kLanes = 4;

/// Counts roots and quotients that differ from the compiler's, for all numbers from 1 to 4, which
/// are divided by numbers from 1 to 2.
__global__ void count_differences(unsigned* differences) {
  constexpr std::uint32_t kOne = 127u << 23;
  const std::uint32_t first = kLanes * (blockIdx.x * blockDim.x + threadIdx.x);
  cuda::Lanes<float, kLanes> x, divisor;
  for (int i = 0; i < kLanes; ++i) {
    const std::uint32_t bits = first + static_cast<std::uint32_t>(i);
    x.lane[i] = bits_to_float(kOne + bits);
    divisor.lane[i] = bits_to_float(kOne | (bits * 2654435761u) >> 9);
  }
  const auto roots = sqrt(x);
  const auto quotients = x / divisor;
  for (int i = 0; i < kLanes; ++i) {
    if (roots.lane[i] != kernels::sqrt(x.lane[i])) atomicAdd(&differences[0], 1);
    if (quotients.lane[i] != x.lane[i] / divisor.lane[i]) atomicAdd(&differences[1], 1);
  }
}

/// Divides `count` numbers, a multiple of the lanes, and takes their roots: as groups, and alone.
__global__ void divide_both_ways(const float* a, const float* b, float* in_groups, float* alone,
                                 int count) {
  using Values = cuda::Lanes<float, kLanes>;
  for (int i = 0; i < count; ++i) {
    alone[i] = a[i] / b[i];
    alone[count + i] = kernels::sqrt(a[i]);
  }
  for (int i = 0; i < count; i += kLanes) {
    Values dividend, divisor;
    for (int lane = 0; lane < kLanes; ++lane) {
      dividend.lane[lane] = a[i + lane];
      divisor.lane[lane] = b[i + lane];
    }
    const Values quotients = dividend / divisor;
    const Values roots = sqrt(dividend);
    for (int lane = 0; lane < kLanes; ++lane) {
      in_groups[i + lane] = quotients.lane[lane];
      in_groups[count + i + lane] = roots.lane[lane];
    }
  }
}

TEST(CudaStraightLine, UnusualOperandsGiveTheCompilersResults) {
  std::vector<float> edges{0.0f, 0x1p-149f, 0x1p-126f, 1.0f, 3.0f, INFINITY, NAN};
  for (const float edge : {cuda::kLeastRoot, 0x1p46f, 0x1.fffffcp127f}) {
    for (const int step : {-1, 0, 1}) {
      edges.push_back(bits_to_float(float_bits(edge) + static_cast<std::uint32_t>(step)));
    }
  }
  std::vector<float> a, b;
  for (const float dividend : edges) {
    for (const float divisor : edges) {  // usual and unusual ones are in one group
      a.insert(a.end(), {dividend, -dividend, dividend, -dividend});
      b.insert(b.end(), {divisor, divisor, -divisor, -divisor});
    }
  }
  const DeviceArray<float> device_a(a), device_b(b);
  const auto count = static_cast<std::int64_t>(a.size());
  const auto in_groups = DeviceArray<float>::unwritten(2 * count);
  const auto alone = DeviceArray<float>::unwritten(2 * count);
  divide_both_ways<<<1, 1, 0, stream()>>>(device_a.data(), device_b.data(), in_groups.data(),
                                          alone.data(), static_cast<int>(count));
  ASSERT_EQ(cudaGetLastError(), cudaSuccess);
  synchronize();
  const std::vector<float> got = in_groups.to_host(), expected = alone.to_host();
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(float_bits(got[i]), float_bits(expected[i]))
        << (i < a.size() ? "quotient" : "root") << " of " << a[i % a.size()] << " and "
        << b[i % a.size()];
  }
}

TEST(CudaStraightLine, RootsAndQuotientsAreTheCompilers) {
  const DeviceArray<unsigned> differences(std::vector<unsigned>{0, 0});
  constexpr unsigned kBlocks = (2u << 23) / (kLanes * kThreads);
  count_differences<<<kBlocks, kThreads, 0, stream()>>>(differences.data());
  ASSERT_EQ(cudaGetLastError(), cudaSuccess);
  synchronize();
  EXPECT_EQ(differences.to_host()[0], 0u);
  EXPECT_EQ(differences.to_host()[1], 0u);
}

}  // namespace
}  // namespace torchfuse::kernels::testing
