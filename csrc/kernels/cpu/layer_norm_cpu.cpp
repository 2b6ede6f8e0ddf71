// SPDX-License-Identifier: BSD-3-Clause
// Layer normalization's output. A row is read once from memory, and then from the cache for the
// variance and for the output. Separate passes for mean and variance lose no digits if the mean is
// large.
#include "kernels/layer_norm.h"

#include "kernels/cpu/layer_norm_types.h"
#include "kernels/cpu/prefetch.h"
#include "kernels/cpu/streaming.h"

namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE {

namespace {

template <class T>
struct RowStatistics {
  T mean;
  T rstd;
};

template <DType kInput, bool kRms>
TORCHFUSE_INLINE RowStatistics<ComputeOf<kInput>> statistics_of(const ElementOf<kInput>* x,
                                                                std::int64_t columns, double eps) {
  using T = ComputeOf<kInput>;
  using V = VectorOf<kInput>;
  const double count = static_cast<double>(columns);
  double total[1];
  T mean(0);
  if constexpr (!kRms) {
    sum_row<T>(columns, total,
               [&](auto& sums, std::int64_t v, std::int64_t i, std::int64_t elements)
                   __attribute__((always_inline)) {
                     sums[0][v] = sums[0][v] + load_some<kInput>(x + i, elements, V(T(0)));
                   });
    mean = static_cast<T>(total[0] / count);
  }
  const V center(mean);
  sum_row<T>(columns, total,
             [&](auto& sums, std::int64_t v, std::int64_t i, std::int64_t elements)
                 __attribute__((always_inline)) {
                   prefetch(x + columns + i, 0);  // next row
                   V deviation = load_some<kInput>(x + i, elements, center);
                   if constexpr (!kRms) deviation = deviation - center;
                   sums[0][v] = fma(deviation, deviation, sums[0][v]);
                 });
  // Return NaN if the mean is infinite. Otherwise the result would depend on unused lanes in the
  // last vector.
  return {mean, static_cast<T>(row_rstd(total[0] / count, eps)) + (mean - mean)};
}

template <DType kInput, DType kOutput, bool kRms>
__attribute__((noinline)) void normalize_rows(const LayerNormArgs& args, std::int64_t begin,
                                              std::int64_t end) {
  using T = ComputeOf<kInput>;
  using V = VectorOf<kInput>;
  const std::int64_t columns = args.shape.columns;
  const T* weight = static_cast<const T*>(args.terms);
  const T* bias = weight + padded_columns(columns);
  const bool streamed = is_worth_streaming<kOutput>(args.output, args.shape.rows, columns);
  for (std::int64_t row = begin; row < end; ++row) {
    const auto* x = static_cast<const ElementOf<kInput>*>(args.input) + row * columns;
    auto* y = static_cast<ElementOf<kOutput>*>(args.output) + row * columns;
    const RowStatistics<T> row_is = statistics_of<kInput, kRms>(x, columns, args.eps);
    if constexpr (!kRms) static_cast<T*>(args.mean)[row] = row_is.mean;
    static_cast<T*>(args.rstd)[row] = row_is.rstd;
    for_each_element<kWidthOf<kInput>>(
        columns,
        [&](std::int64_t i) __attribute__((always_inline)) {
          const V x_hat =
              x_hat_of_input(load_vector<kInput>(x + i), V(row_is.mean), V(row_is.rstd));
          store_in_row<kOutput>(
              y + i, layer_norm_output(x_hat, load_terms(weight + i), load_terms(bias + i)),
              streamed);
        },
        [&](std::int64_t i) __attribute__((always_inline)) {
          const T x_hat = x_hat_of_input(load_one(x + i), row_is.mean, row_is.rstd);
          store_one(y + i, layer_norm_output(x_hat, weight[i], bias[i]));
        });
  }
  if (streamed) finish_streaming();
}

}  // namespace

void layer_norm(const LayerNormArgs& args, std::int64_t begin, std::int64_t end) {
  with_dtypes(args.shape, [&]<DType kInput, DType kOutput>() __attribute__((always_inline)) {
    if (args.shape.rms) return normalize_rows<kInput, kOutput, true>(args, begin, end);
    normalize_rows<kInput, kOutput, false>(args, begin, end);
  });
}

}  // namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE
