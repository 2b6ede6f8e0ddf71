// SPDX-License-Identifier: BSD-3-Clause
// Layer normalization gradients. A block of rows is read once from memory for the rows' sums, and
// once more from the cache for the gradient.
#include "kernels/layer_norm_backward.h"

#include "kernels/cpu/layer_norm_types.h"
#include "kernels/cpu/prefetch.h"
#include "kernels/cpu/streaming.h"

namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE {

namespace {

/// Rows per block: weight and partial sums are loaded once for all rows of a block.
constexpr std::int64_t kBlockRows = 4;
/// Up to this many columns, rows are processed one at a time: the row, the weight and the partial
/// sums fit the first-level cache.
constexpr std::int64_t kColumnsAlone = 1024;

/// A pass's operands, and x_hat from either source.
template <DType kInput, DType kOutput, bool kFromOutput>
struct Pass {
  static constexpr DType kSource = kFromOutput ? kOutput : kInput;
  static constexpr DType kGrad = kInput;
  using T = ComputeOf<kInput>;
  using V = VectorOf<kInput>;

  std::int64_t columns;
  bool rms;
  const ElementOf<kSource>* source;
  const ElementOf<kOutput>* grad_output;
  ElementOf<kInput>* grad_input;
  const T* mean;
  const T* rstd;
  const T* weight;
  const T* bias;
  const T* inverse_weight;
  bool streamed;  ///< whether grad_input is written past the caches

  explicit Pass(const LayerNormBackwardArgs& args)
      : columns(args.shape.columns),
        rms(args.shape.rms),
        source(static_cast<const ElementOf<kSource>*>(args.source)),
        grad_output(static_cast<const ElementOf<kOutput>*>(args.grad_output)),
        grad_input(static_cast<ElementOf<kInput>*>(args.grad_input)),
        mean(static_cast<const T*>(args.mean)),
        rstd(static_cast<const T*>(args.rstd)),
        weight(static_cast<const T*>(args.terms)),
        bias(weight + padded_columns(columns)),
        inverse_weight(bias + padded_columns(columns)),
        streamed(is_worth_streaming<kInput>(args.grad_input, args.shape.rows, columns)) {}

  TORCHFUSE_INLINE T mean_of(std::int64_t row) const {
    return kFromOutput || rms ? T(0) : mean[row];
  }

  /// Load vectors from column `c` on, with zeros past the row's end.
  TORCHFUSE_INLINE V dy(std::int64_t row, std::int64_t c, std::int64_t elements) const {
    return load_some<kOutput>(grad_output + row * columns + c, elements, V(T(0)));
  }
  TORCHFUSE_INLINE V x_hat(std::int64_t row, std::int64_t c, std::int64_t elements, V row_mean,
                           V row_rstd) const {
    const V x = load_some<kSource>(source + row * columns + c, elements, row_mean);
    if constexpr (kFromOutput) {
      return x_hat_of_output(x, load_terms(bias + c), load_terms(inverse_weight + c));
    } else {
      return x_hat_of_input(x, row_mean, row_rstd);
    }
  }
};

/// Values per row that the gradients of the row's elements need.
template <class T>
struct RowTerms {
  T mean;
  T rstd;
  T mean_g;
  T minus_mean_g_x_hat;
};

/// Not inlined, like differentiate(), because copies of a loop over a row make this file slow to
/// compile.
template <class Pass>
__attribute__((noinline)) RowTerms<typename Pass::T> terms_of(const Pass& pass, std::int64_t row) {
  using T = typename Pass::T;
  using V = typename Pass::V;
  double totals[2];  // of g, and of g * x_hat
  RowTerms<T> terms{pass.mean_of(row), pass.rstd[row], T(0), T(0)};
  sum_row<T>(pass.columns, totals,
             [&](auto& sums, std::int64_t v, std::int64_t c, std::int64_t elements)
                 __attribute__((always_inline)) {
                   const V g = pass.dy(row, c, elements) * load_terms(pass.weight + c);
                   const V x_hat = pass.x_hat(row, c, elements, V(terms.mean), V(terms.rstd));
                   sums[0][v] = sums[0][v] + g;
                   sums[1][v] = fma(g, x_hat, sums[1][v]);
                 });
  const double count = static_cast<double>(pass.columns);
  if (!pass.rms) terms.mean_g = static_cast<T>(totals[0] / count);
  terms.minus_mean_g_x_hat = static_cast<T>(-totals[1] / count);
  return terms;
}

/// Computes the gradients of rows from `row` on, and adds the rows to the partial sums.
template <std::int64_t kRows, class Pass>
__attribute__((noinline)) void differentiate(const Pass& pass, std::int64_t row,
                                             typename Pass::T* weight_sums,
                                             typename Pass::T* bias_sums) {
  using T = typename Pass::T;
  using V = typename Pass::V;
  constexpr std::int64_t kWidth = Simd<T>::kWidth;
  RowTerms<T> rows[kRows];
  for (std::int64_t r = 0; r < kRows; ++r) rows[r] = terms_of(pass, row + r);
  const auto at_columns = [&](std::int64_t c,
                              std::int64_t elements) __attribute__((always_inline)) {
    // The row behind a short row is in another page, which the hardware does not prefetch.
    if constexpr (kRows == 1) {
      prefetch(pass.grad_output + (row + 1) * pass.columns + c, 0);
      prefetch(pass.source + (row + 1) * pass.columns + c, 0);
    }
    const V weight = load_terms(pass.weight + c);
    V weight_sum(T(0));
    V bias_sum(T(0));
#pragma GCC unroll 8
    for (std::int64_t r = 0; r < kRows; ++r) {
      const RowTerms<T>& terms = rows[r];
      const V dy = pass.dy(row + r, c, elements);
      const V x_hat = pass.x_hat(row + r, c, elements, V(terms.mean), V(terms.rstd));
      weight_sum = fma(dy, x_hat, weight_sum);
      bias_sum = bias_sum + dy;
      if (pass.grad_input == nullptr) continue;
      const V dx = layer_norm_grad_input(dy * weight, x_hat, V(terms.mean_g),
                                         V(terms.minus_mean_g_x_hat), V(terms.rstd));
      auto* to = pass.grad_input + (row + r) * pass.columns + c;
      if (pass.streamed) {
        stream_vector<Pass::kGrad>(to, dx);
      } else {
        store_some<Pass::kGrad>(to, elements, dx);
      }
    }
    if (weight_sums == nullptr) return;
    store_terms(weight_sums + c, load_terms(weight_sums + c) + weight_sum);
    store_terms(bias_sums + c, load_terms(bias_sums + c) + bias_sum);
  };
  std::int64_t c = 0;
  for (; c + kWidth <= pass.columns; c += kWidth) at_columns(c, kWidth);
  if (c < pass.columns) at_columns(c, pass.columns - c);
}

template <DType kInput, DType kOutput, bool kFromOutput>
__attribute__((noinline)) void backward_items(const LayerNormBackwardArgs& args, std::int64_t begin,
                                              std::int64_t end) {
  using T = ComputeOf<kInput>;
  const Pass<kInput, kOutput, kFromOutput> pass(args);
  const std::int64_t padded = padded_columns(pass.columns);
  for (std::int64_t item = begin; item < end; ++item) {
    T* sums =
        args.partials == nullptr ? nullptr : static_cast<T*>(args.partials) + item * 2 * padded;
    if (sums != nullptr) {
      for (std::int64_t c = 0; c < 2 * padded; ++c) sums[c] = T(0);
    }
    const auto differentiate_rows = [&](auto row_count,
                                        std::int64_t row) __attribute__((always_inline)) {
      differentiate<decltype(row_count)::value>(pass, row, sums,
                                                sums == nullptr ? nullptr : sums + padded);
    };
    const std::int64_t first = item * kLayerNormItemRows;
    const std::int64_t end_of_item = first + kLayerNormItemRows;
    const std::int64_t last = end_of_item < args.shape.rows ? end_of_item : args.shape.rows;
    if (pass.columns <= kColumnsAlone) {
      for_each_row_block<1>(first, last, differentiate_rows);
    } else {
      for_each_row_block<kBlockRows>(first, last, differentiate_rows);
    }
  }
  if (pass.streamed) finish_streaming();
}

}  // namespace

void layer_norm_backward(const LayerNormBackwardArgs& args, std::int64_t begin, std::int64_t end) {
  with_dtypes(args.shape, [&]<DType kInput, DType kOutput>() __attribute__((always_inline)) {
    if (args.from_output) return backward_items<kInput, kOutput, true>(args, begin, end);
    backward_items<kInput, kOutput, false>(args, begin, end);
  });
}

}  // namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE
