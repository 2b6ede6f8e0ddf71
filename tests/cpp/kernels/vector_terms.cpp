// SPDX-License-Identifier: BSD-3-Clause
#include "vector_terms.h"

#include "kernels/cpu/elements.h"
#include "kernels/cpu/lane_sums.h"

namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE {

namespace {

/// Whether a vector reaches the threshold if x is one of its lanes and the others are zeros.
template <class T>
T reaches_in_lane(T x, std::int64_t lane) {
  T lanes[Simd<T>::kWidth] = {};
  lanes[lane] = x;
  return reaches(load_terms(lanes), NormLimits<T>::kThreshold) ? T(1) : T(0);
}

template <class T>
void apply(const testing::TermInputs<T>& in, T* results) {
  using V = typename Simd<T>::V;
  constexpr std::int64_t kWidth = Simd<T>::kWidth;
  for (std::int64_t i = 0; i < in.count; i += kWidth) {
    const V a = load_terms(in.a + i);
    const V b = load_terms(in.b + i);
    const V c = load_terms(in.c + i);
    T* at = results + i;
    const auto put = [&](V x) {
      store_terms(at, x);
      at += in.count;
    };
    put(a + b);
    put(a - b);
    put(a * b);
    put(a / b);
    put(sqrt(a));
    put(fma(a, b, c));
    put(max(a, b));
    put(sign(a));
    put(pass_where_positive(a, b));
    for (std::int64_t lane = 0; lane < kWidth; ++lane) {
      at[lane] = reaches_in_lane(in.a[i + lane], lane);
    }
    at += in.count;
    // Whoever reads it does arithmetic with it, for which denormals are gone. By 1 a compiler would
    // not multiply.
    put(larger_magnitude(a, b) * V(T(2)));
  }
}

/// Calls pair(i) for every two vectors of bf16 elements that a level has pairs for, else single(i).
template <DType kDType = DType::kBFloat16, class Pair, class Single>
void for_each_pair(std::int64_t count, const Pair& pair, const Single& single) {
  constexpr std::int64_t kStep = (kHasPairs<kDType> ? 2 : 1) * kWidthOf<kDType>;
  for (std::int64_t i = 0; i < count; i += kStep) {
    if constexpr (kHasPairs<kDType>) {
      pair(VectorOf<kDType>(), i);
    } else {
      single(i);
    }
  }
}

}  // namespace

void apply_terms(const testing::TermInputs<float>& in, float* results) { apply(in, results); }
void apply_terms(const testing::TermInputs<double>& in, double* results) { apply(in, results); }

void load_bfloat16s(const BFloat16* from, std::int64_t count, float* to) {
  for (std::int64_t i = 0; i < count; i += kWidthOf<DType::kBFloat16>) {
    store_terms(to + i, load_bf16(from + i));
  }
}

void load_bfloat16_pairs(const BFloat16* from, std::int64_t count, float* to) {
  for_each_pair(
      count,
      [&](auto even, std::int64_t i) {
        constexpr std::int64_t kWidth = kWidthOf<DType::kBFloat16>;
        auto odd = even;
        load_bf16_pair(from + i, even, odd);
        float sides[2][kWidth];
        store_terms(sides[0], even);
        store_terms(sides[1], odd);
        for (std::int64_t k = 0; k < 2 * kWidth; ++k) to[i + k] = sides[k % 2][k / 2];
      },
      [&](std::int64_t i) { store_terms(to + i, load_bf16(from + i)); });
}

void load_halves(const Half* from, std::int64_t count, float* to) {
  for (std::int64_t i = 0; i < count; i += kWidthOf<DType::kFloat16>) {
    store_terms(to + i, load_f16(from + i));
  }
}

void load_masters(const BFloat16* param, const std::int16_t* remainder, std::int64_t count,
                  float* to) {
  for (std::int64_t i = 0; i < count; i += kWidthOf<DType::kFloat32>) {
    store_terms(to + i, load_split(param + i, remainder + i));
  }
}

void store_floats(const float* from, std::int64_t count, const testing::Stored& to) {
  for (std::int64_t i = 0; i < count; i += kWidthOf<DType::kFloat32>) {
    const VecF x = load_terms(from + i);
    store_bf16(to.nearest + i, x);
    store_stochastic(to.stochastic + i, x, testing::kStoredKey,
                     testing::kStoredElement + static_cast<std::uint64_t>(i));
    store_f16(to.half + i, x);
    store_split(to.param + i, to.remainder + i, x);
  }
  for_each_pair(
      count,
      [&](auto even, std::int64_t i) {
        constexpr std::int64_t kWidth = kWidthOf<DType::kBFloat16>;
        float sides[2][kWidth];
        for (std::int64_t k = 0; k < 2 * kWidth; ++k) sides[k % 2][k / 2] = from[i + k];
        even = load_terms(sides[0]);
        store_bf16_pair(to.nearest_in_pairs + i, even, decltype(even)(load_terms(sides[1])));
      },
      [&](std::int64_t i) { store_bf16(to.nearest_in_pairs + i, load_terms(from + i)); });
}

}  // namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE
