// SPDX-License-Identifier: BSD-3-Clause
// Guards of autocast, and the state of autocast inside forward and backward of a function that uses
// the helpers; tests/python/amp/test_autocast_program.py compares that with Python's decorators.
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/amp/autocast.h>
#include <torchfuse/amp/custom_function.h>

#include <optional>
#include <stdexcept>
#include <thread>
#include <tuple>
#include <type_traits>
#include <vector>

#include "../optim/optim_testing.h"

namespace torchfuse::testing {
namespace {

using amp::AutocastGuard;
using amp::CustomBackward;
using amp::CustomForward;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

static_assert(!std::is_copy_constructible_v<AutocastGuard>);
static_assert(!std::is_move_constructible_v<AutocastGuard>);

/// All autocast state that a guard may touch, on both devices.
auto autocast_state() {
  const int nesting = at::autocast::increment_nesting() - 1;
  at::autocast::decrement_nesting();
  return std::make_tuple(
      at::autocast::is_autocast_enabled(at::kCPU), at::autocast::is_autocast_enabled(at::kCUDA),
      at::autocast::get_autocast_dtype(at::kCPU), at::autocast::get_autocast_dtype(at::kCUDA),
      at::autocast::is_autocast_cache_enabled(), nesting);
}

torch::ScalarType matmul_dtype() {
  const torch::Tensor a = torch::ones({2, 2});
  return a.mm(a).scalar_type();
}

TEST(AutocastGuard, CastsInsideItsScopeOnly) {
  const auto before = autocast_state();
  for (const torch::ScalarType dtype : {torch::kBFloat16, torch::kHalf}) {
    const AutocastGuard autocast(torch::kCPU, dtype);
    EXPECT_EQ(matmul_dtype(), dtype);
    EXPECT_EQ(torch::ones(3).exp().scalar_type(), torch::kFloat);
  }
  {
    const AutocastGuard autocast(torch::kCPU);
    EXPECT_EQ(matmul_dtype(), at::autocast::get_autocast_dtype(at::kCPU));
  }
  EXPECT_EQ(matmul_dtype(), torch::kFloat);
  EXPECT_EQ(autocast_state(), before);
}

TEST(AutocastGuard, DisabledMakesAnIsland) {
  const auto before = autocast_state();
  for (const torch::DeviceType device : {torch::kCPU, torch::kCUDA}) {
    const AutocastGuard outer(device, torch::kHalf, true, /*cache_enabled=*/false);
    const auto inside_outer = autocast_state();
    {
      const auto island = AutocastGuard::disabled(device);
      EXPECT_FALSE(at::autocast::is_autocast_enabled(device));
      // As in Python, a guard inside goes on with the type of the one outside.
      EXPECT_EQ(at::autocast::get_autocast_dtype(device), torch::kHalf);
      EXPECT_FALSE(at::autocast::is_autocast_cache_enabled());
      EXPECT_EQ(matmul_dtype(), torch::kFloat);
      const AutocastGuard inner(device);
      EXPECT_TRUE(at::autocast::is_autocast_enabled(device));
      EXPECT_EQ(matmul_dtype(), device == torch::kCPU ? torch::kHalf : torch::kFloat);
    }
    EXPECT_EQ(autocast_state(), inside_outer);
  }
  EXPECT_EQ(autocast_state(), before);
  const auto alone = AutocastGuard::disabled(torch::kCPU);
  EXPECT_EQ(matmul_dtype(), torch::kFloat);
}

TEST(AutocastGuard, ADisabledGuardTakesAnyDtype) {
  const AutocastGuard off(torch::kCPU, torch::kFloat, /*enabled=*/false);
  EXPECT_EQ(matmul_dtype(), torch::kFloat);
  EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCPU), torch::kFloat);
}

TEST(AutocastGuard, GuardsOfBothDevicesDoNotMix) {
  const auto before = autocast_state();
  {
    const AutocastGuard cuda(torch::kCUDA, torch::kBFloat16);
    EXPECT_TRUE(at::autocast::is_autocast_enabled(at::kCUDA));
    EXPECT_EQ(matmul_dtype(), torch::kFloat);
    const AutocastGuard cpu(torch::kCPU, torch::kHalf);
    EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCUDA), torch::kBFloat16);
    EXPECT_EQ(matmul_dtype(), torch::kHalf);
  }
  EXPECT_EQ(autocast_state(), before);
}

// A weight's cast is kept while a guard lives, and released with the outermost one.
TEST(AutocastGuard, ReleasesCastsOfWeightsWithTheOutermostGuard) {
  const torch::Tensor weight = torch::ones({2, 2}, torch::requires_grad());
  const torch::Tensor data = torch::ones({2, 2});
  c10::weak_intrusive_ptr<c10::TensorImpl> cast(data.getIntrusivePtr());
  {
    const AutocastGuard outer(torch::kCPU, torch::kBFloat16);
    {
      const AutocastGuard inner(torch::kCPU, torch::kBFloat16);
      cast = c10::weak_intrusive_ptr<c10::TensorImpl>(
          at::autocast::cached_cast(at::kBFloat16, weight, at::kCPU).getIntrusivePtr());
    }
    EXPECT_FALSE(cast.expired());
  }
  EXPECT_TRUE(cast.expired());
}

// Without the cache a weight is cast anew in every use.
TEST(AutocastGuard, CachesCastsOfWeightsUnlessToldNotTo) {
  const torch::Tensor weight = torch::ones({2, 2}, torch::requires_grad());
  for (const bool cache : {true, false}) {
    const AutocastGuard autocast(torch::kCPU, torch::kBFloat16, true, cache);
    const torch::Tensor first = at::autocast::cached_cast(at::kBFloat16, weight, at::kCPU);
    const torch::Tensor second = at::autocast::cached_cast(at::kBFloat16, weight, at::kCPU);
    EXPECT_EQ(first.is_same(second), cache);
  }
}

TEST(AutocastGuard, RefusesOtherDevicesAndDtypes) {
  const auto before = autocast_state();
  expect_error([] { const AutocastGuard autocast(torch::kMPS); },
               "AutocastGuard: expected device_type to be kCPU or kCUDA, got mps.");
  expect_error([] { const AutocastGuard autocast(torch::kCPU, torch::kFloat); },
               "AutocastGuard: expected dtype to be kHalf or kBFloat16, got Float. Use "
               "AutocastGuard::disabled(device_type) for full precision.");
  EXPECT_EQ(autocast_state(), before);
}

/// Whether autocast is on, and with which type.
using State = std::tuple<bool, torch::ScalarType>;

State state(torch::DeviceType device = torch::kCPU) {
  return {at::autocast::is_autocast_enabled(device), at::autocast::get_autocast_dtype(device)};
}

/// What the function saw when it last ran.
struct Seen {
  std::optional<State> forward;
  std::optional<State> backward;
  torch::ScalarType input = torch::kFloat;
};
Seen seen;

/// x @ weight, with the gradients of x and weight.
struct MatMul : torch::autograd::Function<MatMul> {
  static torch::Tensor forward(AutogradContext* ctx, torch::Tensor x, torch::Tensor weight,
                               std::optional<torch::ScalarType> cast_inputs,
                               torch::DeviceType device) {
    const CustomForward amp(ctx, device, cast_inputs);
    seen.forward = state(device);
    x = amp.cast(x);
    weight = amp.cast(weight);
    ctx->save_for_backward({x, weight});
    ctx->saved_data["device"] = static_cast<std::int64_t>(device);
    seen.input = x.scalar_type();
    return x.mm(weight);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto device = static_cast<torch::DeviceType>(ctx->saved_data["device"].toInt());
    const CustomBackward amp(ctx, device);
    seen.backward = state(device);
    const auto saved = ctx->get_saved_variables();
    return {grads[0].mm(saved[1].t()), saved[0].t().mm(grads[0]), {}, {}};
  }
};

struct Inputs {
  torch::Tensor x = torch::ones({2, 2}, torch::requires_grad());
  torch::Tensor weight = torch::full({2, 2}, 0.5, torch::requires_grad());
};

torch::Tensor apply(const Inputs& inputs,
                    std::optional<torch::ScalarType> cast_inputs = std::nullopt,
                    torch::DeviceType device = torch::kCPU) {
  seen = Seen();
  return MatMul::apply(inputs.x, inputs.weight, cast_inputs, device);
}

class CustomFunction : public ::testing::Test {
 protected:
  const State outside_ = state();
  const Inputs inputs_;
};

TEST_F(CustomFunction, BackwardFindsTheStateOnAnotherThread) {
  for (const auto cast_inputs : {std::optional<torch::ScalarType>(), {torch::kFloat}}) {
    torch::Tensor product;
    {
      const AutocastGuard autocast(torch::kCPU, torch::kHalf);
      product = apply(inputs_, cast_inputs);
    }
    State after;
    std::thread([&] {
      product.sum().backward();
      after = state();
    }).join();
    EXPECT_EQ(seen.backward, State(!cast_inputs, torch::kHalf));
    EXPECT_EQ(after, outside_);
  }
}

TEST_F(CustomFunction, KnowsTheStateOfCudaWithoutADevice) {
  torch::Tensor product;
  {
    const AutocastGuard autocast(torch::kCUDA, torch::kBFloat16);
    product = apply(inputs_, torch::kHalf, torch::kCUDA);
    EXPECT_EQ(seen.forward, State(false, torch::kBFloat16));
    EXPECT_EQ(seen.input, torch::kFloat) << "a tensor of the CPU is none of CUDA's inputs";
  }
  product.sum().backward();
  EXPECT_EQ(seen.backward, State(false, torch::kBFloat16));
}

TEST_F(CustomFunction, CastsTensorsOfFloatingPointAlone) {
  const AutocastGuard autocast(torch::kCPU, torch::kHalf);
  AutogradContext ctx;
  const CustomForward amp(&ctx, torch::kCPU, torch::kBFloat16);
  for (const torch::ScalarType dtype : {torch::kDouble, torch::kLong, torch::kBool}) {
    const torch::Tensor tensor = torch::ones(2, dtype);
    EXPECT_TRUE(amp.cast(tensor).is_same(tensor)) << dtype;
  }
  const torch::Tensor undefined;
  EXPECT_FALSE(amp.cast(undefined).defined());
  EXPECT_EQ(amp.cast(std::optional<torch::Tensor>()), std::nullopt);
  EXPECT_EQ(amp.cast(std::make_optional(torch::ones(2)))->scalar_type(), torch::kBFloat16);
  const auto list =
      amp.cast(std::vector<torch::Tensor>{torch::ones(2), torch::ones(2).to(at::kLong)});
  EXPECT_EQ(list[0].scalar_type(), torch::kBFloat16);
  EXPECT_EQ(list[1].scalar_type(), torch::kLong);
}

/// Fails in the middle, in either direction.
struct Fails : torch::autograd::Function<Fails> {
  static torch::Tensor forward(AutogradContext* ctx, const torch::Tensor& x, bool in_backward) {
    const CustomForward amp(ctx, torch::kCPU, torch::kFloat);
    if (!in_backward) throw std::runtime_error("forward fails");
    return x * 2;
  }
  static variable_list backward(AutogradContext* ctx, variable_list) {
    const CustomBackward amp(ctx, torch::kCPU);
    throw std::runtime_error("backward fails");
  }
};

TEST_F(CustomFunction, RestoresTheStateOnExceptions) {
  const AutocastGuard autocast(torch::kCPU, torch::kHalf);
  EXPECT_THROW(Fails::apply(inputs_.x, false), std::runtime_error);
  EXPECT_EQ(state(), State(true, torch::kHalf));
  EXPECT_THROW(Fails::apply(inputs_.x, true).sum().backward(), std::runtime_error);
  EXPECT_EQ(state(), State(true, torch::kHalf));
}

TEST_F(CustomFunction, RefusesBadInput) {
  AutogradContext ctx;
  expect_error([&] { const CustomForward amp(&ctx, torch::kMPS); },
               "CustomForward: expected device_type to be kCPU or kCUDA, got mps.");
  expect_error([&] { const CustomForward amp(&ctx, torch::kCPU, torch::kLong); },
               "CustomForward: expected cast_inputs to be a floating-point type, got Long. Use "
               "kFloat for full precision.");
  expect_error([] { const CustomForward amp(nullptr, torch::kCPU); },
               "CustomForward: expected ctx to be the context of forward(), got a null pointer.");
  expect_error([] { const CustomBackward amp(nullptr, torch::kCPU); },
               "CustomBackward: expected ctx to be the context of backward(), got a null pointer.");
  expect_error([&] { const CustomBackward amp(&ctx, torch::kCPU); },
               "CustomBackward: expected forward() to construct a CustomForward for cpu, got none. "
               "Construct one at the start of forward().");
  EXPECT_EQ(state(), outside_);
}

}  // namespace
}  // namespace torchfuse::testing
