// SPDX-License-Identifier: BSD-3-Clause
#include "ops/fused_step/newton_schulz.h"

#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cmath>

namespace torchfuse::ops {

namespace {

/// Matrices of the products, for at most `count` matrices of m x n.
struct Products {
  Products(const at::Tensor& matrices, std::int64_t count)
      : gram(at::empty({count, smaller(matrices), smaller(matrices)}, matrices.options())),
        update(at::empty_like(gram)),
        next(at::empty({count, matrices.size(1), matrices.size(2)}, matrices.options())) {}

  static std::int64_t smaller(const at::Tensor& matrices) {
    return std::min(matrices.size(1), matrices.size(2));
  }

  at::Tensor gram;
  at::Tensor update;
  at::Tensor next;
};

/// Stores the result of an iteration on `x` in `next`. The smaller of both Gram matrices is used:
/// x^T x gives the same result from the other side.
void iterate(const at::Tensor& x, const std::array<double, 3>& coefficients, at::Tensor& gram,
             at::Tensor& update, at::Tensor& next) {
  const auto [a, b, c] = coefficients;
  const bool wide = x.size(1) <= x.size(2);
  if (wide) {
    at::bmm_out(gram, x, x.mT());
  } else {
    at::bmm_out(gram, x.mT(), x);
  }
  at::baddbmm_out(update, gram, gram, gram, b, c);
  if (wide) {
    at::baddbmm_out(next, x, update, x, a, 1);
  } else {
    at::baddbmm_out(next, x, x, update, a, 1);
  }
}

}  // namespace

NewtonSchulz equal_iterations(const std::array<double, 3>& coefficients, int steps, double eps) {
  return {std::vector<std::array<double, 3>>(static_cast<std::size_t>(steps), coefficients), eps};
}

NewtonSchulz polar_express(int steps, double eps) {
  constexpr std::array<std::array<double, 3>, 8> kOptimal = {{
      {8.28721201814563, -23.595886519098837, 17.300387312530933},
      {4.107059111542203, -2.9478499167379106, 0.5448431082926601},
      {3.9486908534822946, -2.908902115962949, 0.5518191394370137},
      {3.3184196573706015, -2.488488024314874, 0.51004894012372},
      {2.300652019954817, -1.6689039845747493, 0.4188073119525673},
      {1.891301407787398, -1.2679958271945868, 0.37680408948524835},
      {1.8750014808534479, -1.2500016453999487, 0.3750001645474248},
      {1.875, -1.25, 0.375},
  }};
  // Rounding may leave a singular value slightly above an iteration's interval, where the
  // polynomial grows. The margin keeps it inside.
  constexpr double kMargin = 1.01;
  NewtonSchulz settings{{}, eps, kMargin};
  for (int step = 0; step < steps; ++step) {
    auto [a, b, c] = kOptimal[std::min<std::size_t>(step, kOptimal.size() - 1)];
    if (static_cast<std::size_t>(step) + 1 < kOptimal.size()) {
      a /= kMargin;
      b /= std::pow(kMargin, 3);
      c /= std::pow(kMargin, 5);
    }
    settings.iterations.push_back({a, b, c});
  }
  return settings;
}

void newton_schulz_(const at::Tensor& matrices, const NewtonSchulz& settings,
                    std::int64_t at_a_time) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto accumulated = matrices.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const std::int64_t count = matrices.size(0);
  Products products(matrices, std::min(count, at_a_time));
  for (std::int64_t begin = 0; begin < count; begin += at_a_time) {
    const std::int64_t end = std::min(begin + at_a_time, count);
    at::Tensor x = matrices.slice(0, begin, end);
    const at::Tensor place = x;
    const at::Tensor norms =
        at::linalg_vector_norm(x, 2, at::IntArrayRef{1, 2}, /*keepdim=*/true, accumulated);
    x.div_(norms.clamp_min_(settings.eps).mul_(settings.margin));
    at::Tensor gram = products.gram.slice(0, 0, end - begin);
    at::Tensor update = products.update.slice(0, 0, end - begin);
    at::Tensor next = products.next.slice(0, 0, end - begin);
    for (const auto& coefficients : settings.iterations) {
      iterate(x, coefficients, gram, update, next);
      std::swap(x, next);
    }
    if (!x.is_same(place)) place.copy_(x);
  }
}

}  // namespace torchfuse::ops
