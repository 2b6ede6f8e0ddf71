// SPDX-License-Identifier: BSD-3-Clause
// Layer and RMS normalization on the CPU, without torch: values, equal bits at every instruction
// level and for every division of the work, and no access outside of a tensor.
#include "kernels/layer_norm.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "layer_norm_problem.h"
#include "recorded_results.h"

namespace torchfuse::kernels::testing {
namespace {

/// Both passes at one level, the work in ranges of `step` rows, items and columns.
LayerNormResults run(const LayerNormCase& c, const LayerNormInputs& in, CpuIsa isa,
                     std::int64_t step) {
  const LayerNormShape& s = c.shape;
  LayerNormResults r(c);
  const auto in_steps = [step](std::int64_t total, const auto& body) {
    for (std::int64_t i = 0; i < total; i += step) body(i, std::min(i + step, total));
  };
  const auto columns = static_cast<std::size_t>(padded_columns(s.columns));
  std::vector<double> terms(columns * kLayerNormBackwardTerms);
  std::vector<double> partials(static_cast<std::size_t>(layer_norm_partials(s)));
  LayerNormArgs forward = layer_norm_args(c, in, r);
  forward.terms = terms.data();
  layer_norm_terms_cpu(forward);
  in_steps(s.rows, [&](auto i, auto j) { layer_norm_cpu(isa, forward, i, j); });

  LayerNormBackwardArgs backward = layer_norm_backward_args(c, in, r);
  if (c.affine) {
    backward.grad_weight = {r.grad_weight.data(), c.params};
    backward.grad_bias = {r.grad_bias.data(), c.params};
    backward.partials = partials.data();
  }
  backward.terms = terms.data();
  layer_norm_backward_terms_cpu(backward);
  in_steps(layer_norm_items(s),
           [&](auto i, auto j) { layer_norm_backward_cpu(isa, backward, i, j); });
  if (c.affine) {
    in_steps(s.columns, [&](auto i, auto j) { layer_norm_backward_sum_cpu(backward, i, j); });
  }
  return r;
}

std::vector<LayerNormCase> cases() {
  std::vector<LayerNormCase> all;
  for (LayerNormShape shape : layer_norm_types()) {
    for (const auto& [rows, columns] : std::vector<std::pair<std::int64_t, std::int64_t>>{
             {1, 1}, {3, 5}, {2, 32}, {5, 33}, {70, 47}, {131, 64}, {2, 1003}}) {
      shape.rows = rows;
      shape.columns = columns;
      all.push_back({shape, true, false, DType::kFloat32});
      all.push_back({shape, true, true, shape.input});
      all.push_back({shape, false, false, DType::kFloat32});
    }
  }
  return all;
}

TEST(LayerNorm, ValuesAndBitsAtEveryLevel) {
  for (const LayerNormCase& c : cases()) {
    SCOPED_TRACE(name_of(c));
    const LayerNormInputs in(c, /*offset=*/1);
    const LayerNormResults expected = run(c, in, levels_here().back(), 1 << 30);
    // One column is its own mean: x_hat is 0, and nothing but rounding is left of the gradient.
    if (c.shape.columns > 1 || c.shape.rms) expect_right(c, in, expected);
    record(expected.output, expected.mean, expected.rstd, expected.grad_input, expected.grad_weight,
           expected.grad_bias);
    for (const CpuIsa isa : levels_here()) {
      EXPECT_TRUE(run(c, in, isa, 1 << 30) == expected) << name_of(isa);
    }
    EXPECT_TRUE(run(c, in, levels_here().back(), 1) == expected);
  }
}

TEST(LayerNorm, KeepsItsDigitsFarFromZero) {
  const LayerNormCase c{{3, 257, false, DType::kFloat64, DType::kFloat64}};
  const LayerNormInputs in(c, 0, /*center=*/1e6);
  const LayerNormResults r = run(c, in, levels_here().back(), 1 << 30);
  for (std::int64_t row = 0; row < c.shape.rows; ++row) {
    double mean = 0.0;
    double square = 0.0;
    for (std::int64_t j = 0; j < 257; ++j) mean += in.x.get(row * 257 + j) / 257.0;
    for (std::int64_t j = 0; j < 257; ++j) {
      square += (in.x.get(row * 257 + j) - mean) * (in.x.get(row * 257 + j) - mean) / 257.0;
    }
    EXPECT_NEAR(r.rstd.get(row) * std::sqrt(square + 1e-5), 1.0, 1e-9);
  }
}

TEST(LayerNorm, ErrorsDoNotGrowWithTheLengthOfARow) {
  for (const bool rms : {false, true}) {
    // Pieces that are summed together, with and without a rest.
    for (const std::int64_t columns : {8192, 8193, 16384, (1 << 20) + 13}) {
      const LayerNormCase c{{1, columns, rms, DType::kFloat32, DType::kFloat32}, false};
      SCOPED_TRACE(name_of(c));
      const LayerNormInputs in = inputs_of_long_rows(c);
      const LayerNormResults expected = run(c, in, levels_here().back(), 1);
      expect_right(c, in, expected);
      for (const CpuIsa isa : levels_here()) {
        EXPECT_TRUE(run(c, in, isa, 1) == expected) << name_of(isa);
      }
    }
  }
}

TEST(LayerNorm, WeightsOfZeroAreRecomputedFromAsTheLeastWeight) {
  EXPECT_EQ(inverse_weight(0.5), 2.0);
  EXPECT_EQ(inverse_weight(0.0), 1.0 / kLeastWeight);
  EXPECT_EQ(inverse_weight(-1e-9), -1.0 / kLeastWeight);
  EXPECT_TRUE(std::isnan(inverse_weight(std::nan(""))));
}

TEST(LayerNorm, GradientsThatAreNotWantedAreNotWritten) {
  LayerNormCase c{{9, 21, false, DType::kFloat32, DType::kFloat32}};
  const LayerNormInputs in(c);
  LayerNormResults r = run(c, in, levels_here().back(), 1 << 30);
  const LayerNormResults whole = r;
  std::vector<double> terms(static_cast<std::size_t>(padded_columns(21) * kLayerNormBackwardTerms));
  std::vector<double> partials(static_cast<std::size_t>(layer_norm_partials(c.shape)));
  LayerNormBackwardArgs args = layer_norm_backward_args(c, in, r);
  args.grad_input = nullptr;
  Buffer grad_bias(DType::kFloat32, 21);
  args.grad_bias = {grad_bias.data(), DType::kFloat32};
  args.partials = partials.data();
  args.terms = terms.data();
  layer_norm_backward_terms_cpu(args);
  layer_norm_backward_cpu(levels_here().back(), args, 0, layer_norm_items(c.shape));
  layer_norm_backward_sum_cpu(args, 0, 21);
  EXPECT_TRUE(grad_bias == whole.grad_bias);
  EXPECT_TRUE(r == whole);
}

}  // namespace
}  // namespace torchfuse::kernels::testing
