// SPDX-License-Identifier: BSD-3-Clause
// Scalars that the host's processor would round up to the smallest normal float are 0 for every
// functor, as they are on CUDA.
#include <gtest/gtest.h>

#include <cmath>

#include "kernels/functors/adagrad.h"
#include "kernels/functors/adam.h"
#include "kernels/functors/lamb.h"
#include "kernels/functors/lars.h"
#include "kernels/functors/lion.h"
#include "kernels/functors/novograd.h"
#include "kernels/functors/prologue.h"
#include "kernels/functors/scale_update.h"
#include "kernels/functors/sgd.h"

namespace torchfuse::kernels {
namespace {

const double kBelowNormal = std::nextafter(0x1p-126, 0.0);

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

TEST(Coefs, OfTheLossScaleAreZero) {
  ScaleUpdateParams params;
  params.backoff_factor = kBelowNormal;
  ScaleState state{};
  state.scale = 1.0f;
  EXPECT_EQ(update_scale(state, 1.0f, params).scale, 0.0f);

  const float scale = std::nextafterf(0x1p126f, INFINITY);
  PrologueParams prologue;
  prologue.grad_scale = &scale;
  EXPECT_EQ(step_scalars(prologue, NormPartial{}).grad_coef, 0.0);
}

}  // namespace
}  // namespace torchfuse::kernels
