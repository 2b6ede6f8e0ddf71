// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/multi_tensor_unscale.h"

#include <gtest/gtest.h>

#include "kernel_test.h"
#include "recorded_results.h"

namespace torchfuse::kernels {
namespace {

using testing::Buffer;
using testing::Rows;

struct Problem {
  Problem(DType dtype, const std::vector<std::int64_t>& sizes, std::int64_t offset) : dtype(dtype) {
    std::mt19937 random(5);
    for (const std::int64_t numel : sizes) {
      grads.emplace_back(dtype, numel, offset);
      grads.back().fill_normal(random, 100.0);
      TensorRow row;
      row.grad = grads.back().data();
      row.numel = numel;
      rows.add(row);
    }
  }

  bool run(CpuIsa isa, float inv_scale, std::int64_t piece) {
    const UnscaleArgs args{rows.table(dtype, dtype, dtype), &inv_scale, nullptr};
    const std::int64_t total = rows.offsets.back();
    bool found = false;
    for (std::int64_t begin = 0; begin < total; begin += piece) {
      found |= multi_tensor_unscale_cpu(isa, args, begin, std::min(total, begin + piece));
    }
    return found;
  }

  DType dtype;
  std::vector<Buffer> grads;
  Rows rows;
};

const DType kEveryDType[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64};

TEST(Unscale, MultipliesEveryElementOnce) {
  for (const DType dtype : kEveryDType) {
    for (const CpuIsa isa : testing::levels_here()) {
      const Problem before(dtype, testing::interesting_sizes(), 1);
      Problem after(dtype, testing::interesting_sizes(), 1);
      EXPECT_FALSE(after.run(isa, 0.3f, 7919));
      if (isa == CpuIsa::kBaseline) testing::record(after.grads);
      for (std::size_t t = 0; t < before.grads.size(); ++t) {
        Buffer expected = before.grads[t];
        for (std::int64_t i = 0; i < expected.numel(); ++i) {
          const double x = before.grads[t].get(i);
          // One rounding in the arithmetic type, one to the storage type.
          expected.set(i, dtype == DType::kFloat64
                              ? x * static_cast<double>(0.3f)
                              : static_cast<double>(static_cast<float>(x) * 0.3f));
        }
        ASSERT_TRUE(after.grads[t] == expected) << name_of(isa) << ' ' << t;
      }
    }
  }
}

TEST(Unscale, TakesADenormalInverse) {
  for (const CpuIsa isa : testing::levels_here()) {
    SCOPED_TRACE(name_of(isa));
    for (const float inverse : {0x1p-127f, 0x1.8p-128f, 0x1p-149f}) {
      Problem problem(DType::kFloat32, {37}, 1);
      Buffer& grads = problem.grads[0];
      for (std::int64_t i = 0; i < 37; ++i) grads.set(i, std::ldexp(1.0 + i / 64.0, 100));
      EXPECT_FALSE(problem.run(isa, inverse, 37));
      for (std::int64_t i = 0; i < 37; ++i) {
        ASSERT_EQ(grads.get(i), std::ldexp(1.0 + i / 64.0, 100) * inverse) << i;
      }
    }
  }
}

TEST(Unscale, FindsANonFiniteElementAnywhere) {
  for (const DType dtype : kEveryDType) {
    for (const CpuIsa isa : testing::levels_here()) {
      for (const std::int64_t numel : {1, 15, 16, 17, 65, 1003}) {
        for (const double value : {double(INFINITY), -double(INFINITY), double(NAN)}) {
          for (const std::int64_t at : {std::int64_t{0}, numel / 2, numel - 1}) {
            Problem problem(dtype, {4, numel, 4}, 0);
            problem.grads[1].set(at, value);
            ASSERT_TRUE(problem.run(isa, 1.0f, 1000)) << name_of(isa) << ' ' << numel << ' ' << at;
          }
        }
      }
    }
  }
}

// The SIMD conversions against the integer routines: every encoding in, and products that need
// every kind of rounding out.
TEST(Unscale, ConvertsEveryEncodingAtEveryLevel) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const float scale : {1.0f, 1.001953125f, 0.99609375f, 3e-5f, 0.3f, 7.0f}) {
      for (const CpuIsa isa : testing::levels_here()) {
        Buffer all(dtype, 65536);
        for (std::int64_t i = 0; i < 65536; ++i) {
          const auto bits = static_cast<std::uint16_t>(i);
          std::memcpy(static_cast<char*>(all.data()) + 2 * i, &bits, 2);
        }
        const Buffer before = all;
        Rows rows;
        TensorRow row;
        row.grad = all.data();
        row.numel = 65536;
        rows.add(row);
        const UnscaleArgs args{rows.table(dtype, dtype, dtype), &scale, nullptr};
        EXPECT_TRUE(multi_tensor_unscale_cpu(isa, args, 0, 65536));
        Buffer expected = before;
        for (std::int64_t i = 0; i < 65536; ++i) {
          // Kernels flush fp32 denormals on the way in and out.
          const auto flush = [](float x) { return std::fabs(x) < 0x1p-126f ? x * 0.0f : x; };
          const float product = flush(flush(static_cast<float>(before.get(i))) * scale);
          expected.set(i, product);
          if (std::isnan(product)) {
            ASSERT_TRUE(std::isnan(all.get(i))) << name_of(isa) << ' ' << i;
            continue;
          }
          ASSERT_EQ(float_bits(static_cast<float>(all.get(i))),
                    float_bits(static_cast<float>(expected.get(i))))
              << name_of(isa) << ' ' << i << " x " << scale;
        }
      }
    }
  }
}

// A product that its rounding brings to the smallest normal number: x86 looks for denormals after
// it rounds, aarch64 before.
TEST(Unscale, FlushesBeforeOrAfterRoundingAsTheProcessorDoes) {
#if defined(__aarch64__)
  const double expected = 0.0;
#else
  const double expected = 0x1p-126;
#endif
  for (const CpuIsa isa : testing::levels_here()) {
    Problem problem(DType::kFloat32, {35}, 0);
    for (std::int64_t i = 0; i < 35; ++i) problem.grads[0].set(i, 0x1.0008p-63);
    EXPECT_FALSE(problem.run(isa, 0x1.fff0p-64f, 100));
    for (std::int64_t i = 0; i < 35; ++i) {
      ASSERT_EQ(problem.grads[0].get(i), expected) << name_of(isa) << ' ' << i;
    }
  }
}

TEST(Unscale, ReportsInputsNotResults) {
  // A finite element whose product overflows is the scale's fault, not the gradient's.
  Problem problem(DType::kFloat32, {16}, 0);
  for (std::int64_t i = 0; i < 16; ++i) problem.grads[0].set(i, 3e38);
  EXPECT_FALSE(problem.run(detect_cpu_isa(), 1e10f, 16));
  EXPECT_TRUE(std::isinf(problem.grads[0].get(0)));
}

}  // namespace
}  // namespace torchfuse::kernels
