// SPDX-License-Identifier: BSD-3-Clause
// In-place unscale with check: reads and writes every element once.
#include "kernels/multi_tensor_unscale.h"

#include "kernels/common/step_scalars.h"
#include "kernels/cpu/prefetch.h"
#include "kernels/cpu/simd.h"

namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE {

namespace {

TORCHFUSE_INLINE bool is_finite(float x) { return (float_bits(x) & 0x7fffffffu) < 0x7f800000u; }
TORCHFUSE_INLINE bool is_finite(double x) { return x - x == 0.0; }

/// Multiplies a tensor's elements [begin, end). When a non-finite element passes through, its lane
/// in `poison` becomes NaN for good, because x * 0 is only 0 for a finite x.
template <class T>
TORCHFUSE_INLINE bool unscale_tensor(void* grad, DType dtype, std::int64_t begin, std::int64_t end,
                                     Ahead ahead, GradCoef<T> coef) {
  using V = typename Simd<T>::V;
  constexpr std::int64_t kWidth = Simd<T>::kWidth;
  const std::int64_t size = static_cast<std::int64_t>(size_of(dtype));
  V poison(T(0));
  const auto unscale = [&](void* data, std::int64_t index) __attribute__((always_inline)) {
    const V x = load(data, index, dtype, T());
    poison = fma(x, V(T(0)), poison);
    store(data, index, dtype, coef.scaled(x), T());
  };
  std::int64_t i = begin;
  for (; i + kBlock<T> <= end; i += kBlock<T>) {
    if (i < ahead.near_end) prefetch_ahead<1>(grad, i * size, kBlock<T> * size);
    if (i < ahead.far_end) prefetch_ahead<2>(grad, i * size, kBlock<T> * size);
#pragma GCC unroll 4
    for (std::int64_t v = 0; v < kBlock<T>; v += kWidth) unscale(grad, i + v);
  }
  for (; i + kWidth <= end; i += kWidth) unscale(grad, i);
  if (i < end) {
    alignas(64) char buffer[64] = {};
    char* const tail = static_cast<char*>(grad) + i * size;
    for (std::int64_t b = 0; b < (end - i) * size; ++b) buffer[b] = tail[b];
    unscale(buffer, 0);
    for (std::int64_t b = 0; b < (end - i) * size; ++b) tail[b] = buffer[b];
  }
  T lanes[kWidth];
  memcpy(lanes, &poison, sizeof lanes);
  bool finite = true;
  for (std::int64_t lane = 0; lane < kWidth; ++lane) finite = finite && is_finite(lanes[lane]);
  return !finite;
}

template <class T>
TORCHFUSE_INLINE bool unscale_elements(const UnscaleArgs& args, std::int64_t begin,
                                       std::int64_t end) {
  const TensorTable& table = args.tensors;
  const auto coef = grad_coef_of<T>(widened(*args.inv_scale));
  const auto size = static_cast<std::int64_t>(size_of(table.grad));
  bool found = false;
  for (std::int64_t t = find_row(table.offsets, table.count, begin); begin < end; ++t) {
    const std::int64_t stop = table.offsets[t + 1] < end ? table.offsets[t + 1] : end;
    if (stop == begin) continue;
    const TensorRow& row = table.rows[t];
    prefetch_later_grad(table, t);
    const Ahead ahead = ahead_of(table, row, size, size);
    found |= unscale_tensor<T>(row.grad, table.grad, begin - table.offsets[t],
                               stop - table.offsets[t], ahead, coef);
    begin = stop;
  }
  return found;
}

}  // namespace

bool multi_tensor_unscale(const UnscaleArgs& args, std::int64_t begin, std::int64_t end) {
  if (begin >= end) return false;
  if (args.tensors.grad == DType::kFloat64) return unscale_elements<double>(args, begin, end);
  const FlushDenormals flush;
  return unscale_elements<float>(args, begin, end);
}

}  // namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE
