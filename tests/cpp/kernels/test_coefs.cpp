// SPDX-License-Identifier: BSD-3-Clause
// Scalars that the host's processor would round up to the smallest normal float are 0 for every
// functor, as they are on CUDA.
#include <gtest/gtest.h>

#include <cmath>

#include "kernels/cpu/flush_denormals.h"
#include "kernels/functors/adagrad.h"
#include "kernels/functors/adam.h"
#include "kernels/functors/lamb.h"
#include "kernels/functors/lars.h"
#include "kernels/functors/lion.h"
#include "kernels/functors/muon.h"
#include "kernels/functors/novograd.h"
#include "kernels/functors/prologue.h"
#include "kernels/functors/scale_update.h"
#include "kernels/functors/sgd.h"

namespace torchfuse::kernels {
namespace {

/// The largest number that does not round to a normal float.
const double kBelowNormal = std::nextafter(0x1p-126 * (1.0 - 0x1p-25), 0.0);

template <class Functor>
typename Functor::template Coefs<float> with_tiny_lr() {
  typename Functor::Params params;
  params.lr.value = kBelowNormal;
  return Functor::template prepare<float>(params, 1.0);
}

TEST(Coefs, OfTinyLearningRatesAreZero) {
  EXPECT_EQ(with_tiny_lr<Adagrad>().minus_lr, 0.0f);
  EXPECT_EQ(with_tiny_lr<Adam>().minus_step_size, 0.0f);
  EXPECT_EQ(with_tiny_lr<Lamb>().minus_lr, 0.0f);
  EXPECT_EQ(with_tiny_lr<Lars>().lr, 0.0f);
  EXPECT_EQ(with_tiny_lr<Lion>().minus_lr, 0.0f);
  EXPECT_EQ(with_tiny_lr<MuonUpdate>().minus_lr, 0.0f);
  EXPECT_EQ(with_tiny_lr<NovoGrad>().minus_rate, 0.0f);
  EXPECT_EQ(with_tiny_lr<Sgd>().minus_lr, 0.0f);
}

TEST(Coefs, OfTheNormsOfATensorAreZero) {
  const double norms[] = {1.0, 1.0};
  LarsParams lars;
  lars.lr.value = kBelowNormal;
  lars.trust_coefficient.value = 1.0;
  Lars::Coefs<float> coefs = Lars::prepare<float>(lars, 1.0);
  Lars::apply_norms(lars, norms, coefs);
  EXPECT_EQ(coefs.lr, 0.0f);
}

TEST(Coefs, OfABackoffAreZero) {
  ScaleUpdateParams params;
  params.backoff_factor = kBelowNormal;
  ScaleState state{};
  state.scale = 1.0f;
  EXPECT_EQ(update_scale(state, 1.0f, params).scale, 0.0f);
}

// A product with a gradient is rounded once, and flushed where it is itself denormal alone.
TEST(Coefs, OfGradientsFlushNoNormalProduct) {
  const cpu::FlushDenormals flush;
  for (int coef_exponent = -250; coef_exponent <= 100; coef_exponent += 5) {
    const auto coef = grad_coef_of<float>(std::ldexp(1.0 + 1.0 / 3.0, coef_exponent));
    for (int grad_exponent = -126; grad_exponent <= 127; ++grad_exponent) {
      const float grad = std::ldexp(1.7f, grad_exponent);
      const double factor =
          std::ldexp(static_cast<double>(static_cast<float>(1.0 + 1.0 / 3.0)), coef_exponent);
      const double product = factor * static_cast<double>(grad);
      if (product < 0x1p-125 || product > 0x1p127) continue;
      ASSERT_EQ(coef.scaled(grad), static_cast<float>(product))
          << coef_exponent << ' ' << grad_exponent;
    }
  }
  EXPECT_FALSE(grad_coef_of<float>(0.5).tiny);
  EXPECT_FALSE(grad_coef_of<float>(0x1p-126).tiny);
  EXPECT_EQ(grad_coef_of<float>(0.0).scaled(3.0f), 0.0f);
  EXPECT_TRUE(std::isnan(grad_coef_of<float>(NAN).scaled(1.0f)));
  EXPECT_EQ(grad_coef_of<double>(0x1p-1000).factor, 0x1p-1000);
}

}  // namespace
}  // namespace torchfuse::kernels
