// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/multi_tensor_l2_norm.h"

#include <gtest/gtest.h>

#include "kernel_test.h"
#include "recorded_results.h"

namespace torchfuse::kernels {
namespace {

using testing::Buffer;
using testing::kEveryDType;

struct Problem : testing::Gradients {
  Problem(DType dtype, const std::vector<std::int64_t>& sizes, std::int64_t offset = 0)
      : Problem(Gradients(dtype, sizes, offset)) {}
  explicit Problem(Gradients gradients) : Gradients(std::move(gradients)) {
    for (const TensorRow& row : rows.rows) {
      chunk_offsets.push_back(chunk_offsets.back() + num_norm_chunks(row.numel));
    }
  }

  std::vector<NormPartial> run(CpuIsa isa, std::int64_t piece) const {
    // Poisoned: every chunk must be written.
    std::vector<NormPartial> partials(chunk_offsets.back(), NormPartial{-1.0, -1.0, 77});
    const L2NormArgs args{table(), chunk_offsets.data(), partials.data()};
    in_pieces(piece,
              [&](auto begin, auto end) { multi_tensor_l2_norm_cpu(isa, args, begin, end); });
    return partials;
  }

  NormPartial sum(CpuIsa isa = detect_cpu_isa()) const {
    const auto partials = run(isa, rows.offsets.back());
    NormPartial total{};
    reduce_partials_cpu(partials.data(), static_cast<std::int64_t>(partials.size()), &total);
    return total;
  }

  double expected_norm() const {
    long double sum = 0;
    for (const Buffer& grad : tensors) {
      for (std::int64_t i = 0; i < grad.numel(); ++i) {
        sum += static_cast<long double>(grad.get(i)) * grad.get(i);
      }
    }
    return static_cast<double>(std::sqrt(sum));
  }

  std::vector<std::int64_t> chunk_offsets{0};
};

TEST(L2Norm, MatchesLongDouble) {
  for (const DType dtype : kEveryDType) {
    for (const std::int64_t offset : {0, 1}) {
      const Problem problem(dtype, testing::interesting_sizes(), offset);
      const NormPartial sum = problem.sum();
      const double tolerance = dtype == DType::kFloat64 ? 1e-13 : 1e-6;
      EXPECT_NEAR(norm_of(sum), problem.expected_norm(), tolerance * problem.expected_norm());
      EXPECT_EQ(sum.nonfinite, 0u);
    }
  }
}

// Whole chunks of equal elements around both thresholds, and the largest: no sum of squares
// overflows.
TEST(L2Norm, ElementsOfAnyMagnitudeDoNotOverflow) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat64}) {
    const int exponent = dtype == DType::kFloat64 ? 500 : 58;
    std::vector<int> powers{dtype == DType::kFloat64 ? 1000 : 127};
    for (int power = exponent - 2; power <= exponent + 4; ++power) powers.push_back(power);
    for (const int power : powers) {
      for (const double factor : {1.0, 1.9921875}) {
        Problem problem(dtype, {100, 3 * kNormChunk + 5});
        const double value = std::ldexp(factor, power);
        for (Buffer& grad : problem.tensors) {
          for (std::int64_t i = 0; i < grad.numel(); ++i) grad.set(i, i % 2 == 0 ? value : -value);
        }
        for (const CpuIsa isa : testing::levels_here()) {
          const NormPartial sum = problem.sum(isa);
          const double expected = problem.expected_norm();
          EXPECT_NEAR(norm_of(sum), expected, 1e-6 * expected) << value;
          EXPECT_EQ(sum.nonfinite, 0u) << value;
        }
      }
    }
  }
}

TEST(L2Norm, EveryLevelAndEverySplitGivesTheSameBits) {
  for (const DType dtype : kEveryDType) {
    Problem problem(dtype, testing::interesting_sizes(), 1);
    problem.tensors.back().set(5, dtype == DType::kFloat16 ? 60000.0 : 1e25);
    const auto expected = problem.run(CpuIsa::kBaseline, problem.rows.offsets.back());
    testing::record(expected);
    for (const CpuIsa isa : testing::levels_here()) {
      for (const std::int64_t piece : {1000, 16384, 1000000}) {
        const auto partials = problem.run(isa, piece);
        ASSERT_EQ(
            std::memcmp(partials.data(), expected.data(), partials.size() * sizeof(NormPartial)), 0)
            << name_of(isa) << ' ' << piece;
      }
    }
  }
}

// Uncached gradients are prefetched in another way.
TEST(L2Norm, LargeGradientsGiveTheSameBitsAtEveryLevelAndSplit) {
  constexpr std::int64_t kBlock = std::int64_t{1} << 18;
  Problem problem(DType::kFloat32, {32 * kBlock + 70'005});
  const auto expected = problem.run(CpuIsa::kBaseline, kBlock);
  for (const CpuIsa isa : testing::levels_here()) {
    for (const std::int64_t piece : {kBlock, problem.rows.offsets.back()}) {
      const auto partials = problem.run(isa, piece);
      ASSERT_EQ(
          std::memcmp(partials.data(), expected.data(), partials.size() * sizeof(NormPartial)), 0)
          << name_of(isa) << ' ' << piece;
    }
  }
}

TEST(L2Norm, FindsANonFiniteElementAnywhere) {
  testing::for_each_nonfinite_place({1, 15, 64, 65, 16384, 16385}, [](CpuIsa isa, auto& gradients) {
    ASSERT_NE(Problem(std::move(gradients)).sum(isa).nonfinite, 0u);
  });
}

}  // namespace
}  // namespace torchfuse::kernels
