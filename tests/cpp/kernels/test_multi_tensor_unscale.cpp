// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/multi_tensor_unscale.h"

#include <gtest/gtest.h>

#include "kernel_test.h"
#include "recorded_results.h"

namespace torchfuse::kernels {
namespace {

using testing::Buffer;
using testing::Gradients;
using testing::kEveryDType;

bool unscale(const Gradients& gradients, CpuIsa isa, float inv_scale, std::int64_t piece) {
  const UnscaleArgs args{gradients.table(), &inv_scale, nullptr};
  bool found = false;
  gradients.in_pieces(piece, [&](auto begin, auto end) {
    found |= multi_tensor_unscale_cpu(isa, args, begin, end);
  });
  return found;
}

TEST(Unscale, MultipliesEveryElementOnce) {
  for (const DType dtype : kEveryDType) {
    for (const CpuIsa isa : testing::levels_here()) {
      const Gradients before(dtype, testing::interesting_sizes(), 1);
      Gradients after(dtype, testing::interesting_sizes(), 1);
      EXPECT_FALSE(unscale(after, isa, 0.3f, 7919));
      if (isa == CpuIsa::kBaseline) testing::record(after.tensors);
      for (std::size_t t = 0; t < before.tensors.size(); ++t) {
        Buffer expected = before.tensors[t];
        for (std::int64_t i = 0; i < expected.numel(); ++i) {
          const double x = before.tensors[t].get(i);
          // One rounding in the arithmetic type, one to the storage type.
          expected.set(i, dtype == DType::kFloat64
                              ? x * static_cast<double>(0.3f)
                              : static_cast<double>(static_cast<float>(x) * 0.3f));
        }
        ASSERT_TRUE(after.tensors[t] == expected) << name_of(isa) << ' ' << t;
      }
    }
  }
}

TEST(Unscale, TakesADenormalInverse) {
  for (const CpuIsa isa : testing::levels_here()) {
    SCOPED_TRACE(name_of(isa));
    for (const float inverse : {0x1p-127f, 0x1.8p-128f, 0x1p-149f}) {
      Gradients gradients(DType::kFloat32, {37}, 1);
      Buffer& grads = gradients.tensors[0];
      for (std::int64_t i = 0; i < 37; ++i) grads.set(i, std::ldexp(1.0 + i / 64.0, 100));
      EXPECT_FALSE(unscale(gradients, isa, inverse, 37));
      for (std::int64_t i = 0; i < 37; ++i) {
        ASSERT_EQ(grads.get(i), std::ldexp(1.0 + i / 64.0, 100) * inverse) << i;
      }
    }
  }
}

TEST(Unscale, FindsANonFiniteElementAnywhere) {
  testing::for_each_nonfinite_place({1, 15, 16, 17, 65, 1003}, [](CpuIsa isa, auto& gradients) {
    ASSERT_TRUE(unscale(gradients, isa, 1.0f, 1000));
  });
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
    Gradients gradients(DType::kFloat32, {35}, 0);
    for (std::int64_t i = 0; i < 35; ++i) gradients.tensors[0].set(i, 0x1.0008p-63);
    EXPECT_FALSE(unscale(gradients, isa, 0x1.fff0p-64f, 100));
    for (std::int64_t i = 0; i < 35; ++i) {
      ASSERT_EQ(gradients.tensors[0].get(i), expected) << name_of(isa) << ' ' << i;
    }
  }
}

TEST(Unscale, ReportsInputsNotResults) {
  // A finite element whose product overflows is the scale's fault, not the gradient's.
  Gradients gradients(DType::kFloat32, {16}, 0);
  for (std::int64_t i = 0; i < 16; ++i) gradients.tensors[0].set(i, 3e38);
  EXPECT_FALSE(unscale(gradients, detect_cpu_isa(), 1e10f, 16));
  EXPECT_TRUE(std::isinf(gradients.tensors[0].get(0)));
}

}  // namespace
}  // namespace torchfuse::kernels
