// SPDX-License-Identifier: BSD-3-Clause
// Softmax cross entropy. The forward pass reads a row of logits once from memory for the maximum,
// and once from the cache for the sum of exponentials. The backward pass reads the row once and
// writes the gradient.
#include "kernels/softmax_cross_entropy.h"

#include "kernels/common/exp.h"
#include "kernels/cpu/rows.h"

namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE {

namespace {

/// Returns the largest lane, or NaN if a lane is NaN.
template <class T, class V>
TORCHFUSE_INLINE T max_lane(const V (&vectors)[kSumVectors<T>]) {
  alignas(64) T lanes[kSumLanes];
  memcpy(lanes, vectors, sizeof lanes);
  T largest = lanes[0];
  for (const T lane : lanes) largest = max(largest, lane);
  return largest;
}

template <class T>
struct RowSums {
  T largest;
  double exponentials;  ///< sum of exp(logit - largest)
  double below;         ///< sum of (logit - largest)
};

template <DType kDType>
TORCHFUSE_INLINE RowSums<ComputeOf<kDType>> sums_of(const ElementOf<kDType>* x,
                                                    std::int64_t classes, bool with_below) {
  using T = ComputeOf<kDType>;
  using V = VectorOf<kDType>;
  const V first(load_one(x));
  V largest[kSumVectors<T>];
#pragma GCC unroll 32
  for (V& vector : largest) vector = first;
  for_each_summed_vector<T>(classes, [&](std::int64_t v, std::int64_t i,
                                         std::int64_t elements) __attribute__((always_inline)) {
    largest[v] = max(largest[v], load_some<kDType>(x + i, elements, first));
  });
  RowSums<T> result{max_lane<T>(largest), 0.0, 0.0};
  const V center(result.largest);
  // Fill lanes behind the row's end, whose exponential is 0. They are NaN only if the row's sum is
  // NaN anyway.
  const V nothing(static_cast<T>(-__builtin_huge_val()));
  double total[1];
  sum_row<T>(classes, total,
             [&](auto& sums, std::int64_t v, std::int64_t i, std::int64_t elements)
                 __attribute__((always_inline)) {
                   const V x_i = load_some<kDType>(x + i, elements, nothing);
                   sums[0][v] = sums[0][v] + exp_of_negative<T>(x_i - center);
                 });
  result.exponentials = total[0];
  if (!with_below) return result;
  sum_row<T>(classes, total,
             [&](auto& sums, std::int64_t v, std::int64_t i, std::int64_t elements)
                 __attribute__((always_inline)) {
                   const V x_i = load_some<kDType>(x + i, elements, center);
                   sums[0][v] = sums[0][v] + (x_i - center);
                 });
  result.below = total[0];
  return result;
}

template <DType kDType>
__attribute__((noinline)) void loss_rows(const CrossEntropyArgs& args, std::int64_t begin,
                                         std::int64_t end) {
  using T = ComputeOf<kDType>;
  const std::int64_t classes = args.shape.classes;
  for (std::int64_t row = begin; row < end; ++row) {
    const auto* x = static_cast<const ElementOf<kDType>*>(args.logits) + row * classes;
    const RowSums<T> sums = sums_of<kDType>(x, classes, args.smoothing != 0.0);
    const double largest = static_cast<double>(sums.largest);
    const double log_sum = log_of_sum(sums.exponentials);
    const T lse = static_cast<T>(largest + log_sum);
    static_cast<T*>(args.log_sum_exp)[row] = lse;
    static_cast<T*>(args.rest)[row] =
        static_cast<T>(rest_of(static_cast<double>(lse), largest, log_sum));
    const std::int64_t label = args.labels.labels[row];
    if (args.labels.is_ignored(row)) {
      store_channel(args.losses, row, 0.0);
      continue;
    }
    const bool known = label >= 0 && label < classes;
    const double logit = known ? static_cast<double>(load_one(x + label)) : __builtin_nan("");
    const double mean_below = sums.below / static_cast<double>(classes);
    store_channel(args.losses, row,
                  smoothed_loss(log_sum, logit - largest, mean_below, args.smoothing));
  }
}

template <DType kDType>
__attribute__((noinline)) void grad_rows(const CrossEntropyBackwardArgs& args, std::int64_t begin,
                                         std::int64_t end) {
  using T = ComputeOf<kDType>;
  using V = VectorOf<kDType>;
  constexpr std::int64_t kWidth = kWidthOf<kDType>;
  const std::int64_t classes = args.shape.classes;
  const T floor = static_cast<T>(args.smoothing / static_cast<double>(classes));
  for (std::int64_t row = begin; row < end; ++row) {
    const auto* x = static_cast<const ElementOf<kDType>*>(args.logits) + row * classes;
    auto* dx = static_cast<ElementOf<kDType>*>(args.grad_logits) + row * classes;
    if (args.labels.is_ignored(row)) {
      memset(dx, 0, static_cast<std::size_t>(classes) * sizeof *dx);
      continue;
    }
    const std::int64_t label = args.labels.labels[row];
    const bool known = label >= 0 && label < classes;
    const T lse = static_cast<const T*>(args.log_sum_exp)[row];
    const T rest = args.rest == nullptr ? T(0) : static_cast<const T*>(args.rest)[row];
    const T grad_loss = known ? static_cast<T>(load_channel(args.grad_losses, row, 0.0))
                              : static_cast<T>(__builtin_nan(""));
    // Read the label's logit before dx is written, because dx may be the logits.
    const T logit = known ? load_one(x + label) : T(0);
    const auto write = [&](std::int64_t i, std::int64_t elements) __attribute__((always_inline)) {
      store_some<kDType>(dx + i, elements,
                         grad_logit<T>(load_some<kDType>(x + i, elements, V(T(0))), V(lse), V(rest),
                                       V(floor), V(grad_loss)));
    };
    std::int64_t i = 0;
    for (; i + kWidth <= classes; i += kWidth) write(i, kWidth);
    if (i < classes) write(i, classes - i);
    if (!known) continue;
    const T at_label = floor + static_cast<T>(1.0 - args.smoothing);
    store_one(dx + label, grad_logit<T>(logit, lse, rest, at_label, grad_loss));
  }
}

}  // namespace

void softmax_cross_entropy(const CrossEntropyArgs& args, std::int64_t begin, std::int64_t end) {
  with_dtype(args.shape.logits, [&]<DType kDType>() __attribute__((always_inline)) {
    loss_rows<kDType>(args, begin, end);
  });
}

void softmax_cross_entropy_backward(const CrossEntropyBackwardArgs& args, std::int64_t begin,
                                    std::int64_t end) {
  with_dtype(args.shape.logits, [&]<DType kDType>() __attribute__((always_inline)) {
    grad_rows<kDType>(args, begin, end);
  });
}

}  // namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE
