// SPDX-License-Identifier: BSD-3-Clause
// What only a GPU can answer: how it rounds around the smallest normal number, and whether
// compute-sanitizer finds a fault that is there.
//
// TORCHFUSE_PLANTED_FAULT=out_of_bounds or missing_barrier puts that fault into the kernel below.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <numeric>
#include <string>
#include <vector>

#include "device.h"
#include "kernels/common/math.h"

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

}  // namespace
}  // namespace torchfuse::kernels::testing
