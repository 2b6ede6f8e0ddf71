// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/amp/autocast.h>

#include <stdexcept>
#include <thread>
#include <tuple>
#include <type_traits>
#include <vector>

#include "../optim/optim_testing.h"

namespace torchfuse::testing {
namespace {

using amp::AutocastGuard;

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
  EXPECT_EQ(matmul_dtype(), torch::kFloat);
  EXPECT_EQ(autocast_state(), before);
}

TEST(AutocastGuard, UsesTheDevicesDtypeByDefault) {
  const AutocastGuard autocast(torch::kCPU);
  EXPECT_EQ(matmul_dtype(), at::autocast::get_autocast_dtype(at::kCPU));
}

TEST(AutocastGuard, NestsAndMakesIslands) {
  const auto before = autocast_state();
  {
    const AutocastGuard outer(torch::kCPU, torch::kBFloat16);
    const auto inside_outer = autocast_state();
    {
      const AutocastGuard island(torch::kCPU, std::nullopt, /*enabled=*/false,
                                 /*cache_enabled=*/false);
      EXPECT_EQ(matmul_dtype(), torch::kFloat);
      EXPECT_FALSE(at::autocast::is_autocast_cache_enabled());
      {
        const AutocastGuard inner(torch::kCPU, torch::kHalf);
        EXPECT_EQ(matmul_dtype(), torch::kHalf);
      }
      EXPECT_EQ(matmul_dtype(), torch::kFloat);
    }
    EXPECT_EQ(matmul_dtype(), torch::kBFloat16);
    EXPECT_EQ(autocast_state(), inside_outer);
  }
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

TEST(AutocastGuard, RestoresStateWhenAnIslandThrows) {
  const AutocastGuard outer(torch::kCPU, torch::kBFloat16);
  const auto before = autocast_state();
  const auto fail = [] {
    const auto island = AutocastGuard::disabled(torch::kCPU);
    torch::ones({2, 2}).mm(torch::ones({3, 3}));
  };
  EXPECT_THROW(fail(), c10::Error);
  EXPECT_EQ(autocast_state(), before);
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

TEST(AutocastGuard, RestoresStateOnExceptions) {
  const auto before = autocast_state();
  const auto fail = [] {
    const AutocastGuard outer(torch::kCPU, torch::kHalf, true, /*cache_enabled=*/false);
    const AutocastGuard inner(torch::kCUDA, torch::kBFloat16);
    throw std::runtime_error("inside");
  };
  EXPECT_THROW(fail(), std::runtime_error);
  EXPECT_EQ(autocast_state(), before);
}

TEST(AutocastGuard, RestoresStateThatWasNotTheDefault) {
  const auto initial = autocast_state();
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::set_autocast_dtype(at::kCPU, at::kHalf);
  at::autocast::set_autocast_cache_enabled(false);
  const auto before = autocast_state();
  {
    const AutocastGuard autocast(torch::kCPU, torch::kBFloat16, false, true);
  }
  EXPECT_EQ(autocast_state(), before);
  at::autocast::set_autocast_enabled(at::kCPU, std::get<0>(initial));
  at::autocast::set_autocast_dtype(at::kCPU, std::get<2>(initial));
  at::autocast::set_autocast_cache_enabled(std::get<4>(initial));
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

TEST(AutocastGuard, ActsOnItsThreadOnly) {
  const AutocastGuard autocast(torch::kCPU, torch::kHalf);
  torch::ScalarType other = torch::kHalf;
  std::thread([&other] { other = matmul_dtype(); }).join();
  EXPECT_EQ(other, torch::kFloat);
}

TEST(AutocastGuard, ThreadsHaveStatesOfTheirOwn) {
  const auto before = autocast_state();
  std::vector<torch::ScalarType> inside(4, torch::kFloat), after(4, torch::kHalf);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < inside.size(); ++i) {
    threads.emplace_back([&, i] {
      {
        const AutocastGuard autocast(torch::kCPU, i % 2 == 0 ? torch::kHalf : torch::kBFloat16);
        inside[i] = matmul_dtype();
      }
      after[i] = matmul_dtype();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(inside, (std::vector<torch::ScalarType>{torch::kHalf, torch::kBFloat16, torch::kHalf,
                                                    torch::kBFloat16}));
  EXPECT_EQ(after, std::vector<torch::ScalarType>(4, torch::kFloat));
  EXPECT_EQ(autocast_state(), before);
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

}  // namespace
}  // namespace torchfuse::testing
