// SPDX-License-Identifier: BSD-3-Clause
// In-place unscale with check: reads and writes every element once.
#include "kernels/multi_tensor_unscale.h"

#include "kernels/common/step_scalars.h"
#include "kernels/cpu/simd.h"

namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE {

namespace {

TORCHFUSE_INLINE bool is_finite(float x) { return (float_bits(x) & 0x7fffffffu) < 0x7f800000u; }
TORCHFUSE_INLINE bool is_finite(double x) { return x - x == 0.0; }

/// Multiplies a tensor's elements [begin, end). When a non-finite element passes through, its lane
/// in `poison` becomes NaN for good, because x * 0 is only 0 for a finite x.
template <class T>
TORCHFUSE_INLINE bool unscale_tensor(void* grad, DType dtype, std::int64_t begin, std::int64_t end,
                                     GradCoef<T> coef) {
  using V = typename Simd<T>::V;
  constexpr std::int64_t kWidth = Simd<T>::kWidth;
  V poison(T(0));
  std::int64_t i = begin;
  for (; i + kWidth <= end; i += kWidth) {
    const V x = load(grad, i, dtype, T());
    poison = fma(x, V(T(0)), poison);
    store(grad, i, dtype, coef.scaled(x), T());
  }
  if (i < end) {
    alignas(64) char buffer[64] = {};
    const std::int64_t size = static_cast<std::int64_t>(size_of(dtype));
    char* const tail = static_cast<char*>(grad) + i * size;
    for (std::int64_t b = 0; b < (end - i) * size; ++b) buffer[b] = tail[b];
    const V x = load(buffer, 0, dtype, T());
    poison = fma(x, V(T(0)), poison);
    store(buffer, 0, dtype, coef.scaled(x), T());
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
  bool found = false;
  for (std::int64_t t = find_row(table.offsets, table.count, begin); begin < end; ++t) {
    const std::int64_t stop = table.offsets[t + 1] < end ? table.offsets[t + 1] : end;
    if (stop == begin) continue;
    found |= unscale_tensor<T>(table.rows[t].grad, table.grad, begin - table.offsets[t],
                               stop - table.offsets[t], coef);
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
