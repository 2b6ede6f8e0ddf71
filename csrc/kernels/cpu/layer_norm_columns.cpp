// SPDX-License-Identifier: BSD-3-Clause
// The layer normalization computations on one number per column, in fp64.
#include "kernels/layer_norm.h"
#include "kernels/layer_norm_backward.h"

namespace torchfuse::kernels {

namespace {

/// Fills row `index` of the terms: value_of(column), and zeros behind the last column.
template <class T, class ValueOf>
void fill_terms(void* terms, std::int64_t index, std::int64_t columns, const ValueOf& value_of) {
  const std::int64_t padded = padded_columns(columns);
  T* row = static_cast<T*>(terms) + index * padded;
  for (std::int64_t c = 0; c < columns; ++c) row[c] = static_cast<T>(value_of(c));
  for (std::int64_t c = columns; c < padded; ++c) row[c] = T(0);
}

template <class T, class Args>
void fill_weight_and_bias(const Args& args) {
  const std::int64_t columns = args.shape.columns;
  fill_terms<T>(args.terms, 0, columns, [&](auto c) { return load_channel(args.weight, c, 1.0); });
  fill_terms<T>(args.terms, 1, columns, [&](auto c) { return load_channel(args.bias, c, 0.0); });
}

}  // namespace

void layer_norm_terms_cpu(const LayerNormArgs& args) {
  with_compute_type(args.shape.input, [&]<class T>(T) { fill_weight_and_bias<T>(args); });
}

void layer_norm_backward_terms_cpu(const LayerNormBackwardArgs& args) {
  with_compute_type(args.shape.input, [&]<class T>(T) {
    fill_weight_and_bias<T>(args);
    fill_terms<T>(args.terms, 2, args.shape.columns,
                  [&](auto c) { return inverse_weight(load_channel(args.weight, c, 1.0)); });
  });
}

void layer_norm_backward_sum_cpu(const LayerNormBackwardArgs& args, std::int64_t begin,
                                 std::int64_t end) {
  constexpr std::int64_t kTogether = 64;
  const std::int64_t items = layer_norm_items(args.shape);
  const std::int64_t padded = padded_columns(args.shape.columns);
  with_compute_type(args.shape.input, [&]<class T>(T) {
    for (std::int64_t first = begin; first < end; first += kTogether) {
      const std::int64_t count = first + kTogether < end ? kTogether : end - first;
      double weight_sums[kTogether] = {};
      double bias_sums[kTogether] = {};
      for (std::int64_t item = 0; item < items; ++item) {
        const T* partial = static_cast<const T*>(args.partials) + item * 2 * padded + first;
        for (std::int64_t i = 0; i < count; ++i) {
          weight_sums[i] += static_cast<double>(partial[i]);
          bias_sums[i] += static_cast<double>(partial[padded + i]);
        }
      }
      for (std::int64_t i = 0; i < count; ++i) {
        store_channel(args.grad_weight, first + i, weight_sums[i]);
        store_channel(args.grad_bias, first + i, bias_sums[i]);
      }
    }
  });
}

}  // namespace torchfuse::kernels
