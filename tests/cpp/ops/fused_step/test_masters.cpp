// SPDX-License-Identifier: BSD-3-Clause
// Masters of 16-bit parameters. Remainders: tests/cpp/api/optim/test_fused_adam_storage.cpp.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/fused_step.h>
#include <torchfuse/masters.h>

#include <cmath>
#include <string>
#include <vector>

namespace torchfuse {
namespace {

TEST(RemakeMaster, ChangesOnlyWhatDoesNotRoundToTheParameter) {
  const at::Tensor master = torch::randn({1000});
  const at::Tensor kept = master.clone();
  const at::Tensor param = master.to(at::kBFloat16);
  remake_master(param, master);
  EXPECT_TRUE(torch::equal(master, kept));
  param.slice(0, 0, 10).fill_(100.0);
  remake_master(param, master);
  EXPECT_TRUE(torch::equal(master.slice(0, 0, 10), torch::full({10}, 100.0)));
  EXPECT_TRUE(torch::equal(master.slice(0, 10), kept.slice(0, 10)));
  std::string message;
  try {
    remake_master(master, master);
  } catch (const c10::Error& error) {
    message = error.what_without_backtrace();
  }
  EXPECT_NE(message.find("expected param to be of dtype"), std::string::npos) << message;
}

TEST(RemakeMaster, ClearsRemaindersThatExtendNoParameter) {
  const float inf = INFINITY;
  const at::Tensor param = torch::tensor({0.0f, -0.0f, 0.0f, 1.0f, inf, inf, -inf}, at::kBFloat16);
  const at::Tensor remainder = torch::tensor({-1, -32768, 7, -32768, 1, -1, 32767}, at::kShort);
  const at::Tensor masters = master_of_remainder(param, remainder);
  EXPECT_TRUE(torch::equal(masters.isnan(), torch::zeros({7}, at::kBool))) << masters;
  EXPECT_TRUE(std::signbit(masters[1].item<float>()));
  remake_master(param, remainder);
  EXPECT_TRUE(torch::equal(remainder, torch::tensor({0, 0, 7, -32768, 0, -1, 0}, at::kShort)));
  EXPECT_TRUE(torch::equal(master_of_remainder(param, remainder), masters));
}

TEST(Masters, FollowWritesToTheirParameters) {
  // Far from 100, which is written below: a master that rounds to it would be kept.
  const at::Tensor param = torch::randn({100}, at::kBFloat16).requires_grad_();
  FusedSlot slot;
  slot.param = param;
  slot.states = {torch::zeros({100}), torch::zeros({100}), at::Tensor()};
  slot.step = torch::zeros({});
  slot.master = param.detach().to(at::kFloat) * 1.001;
  std::vector<FusedSlot> slots{slot};
  FusedStep step("adam");
  const std::vector<HyperParam> still{0.0, 0.9, 0.999, 0.0, 1e-8, 0.0, 0.0, 1.0, 1.0};
  for (int i = 0; i < 3; ++i) {
    param.mutable_grad() = torch::randn({100}, at::kBFloat16);
    step.step(slots, {still});
  }
  const at::Tensor before = slot.master.clone();
  {
    const torch::NoGradGuard no_grad;
    param.slice(0, 0, 50).fill_(100.0);
    param.copy_(param.clone());
  }
  step.step(slots, {still});
  EXPECT_TRUE(torch::equal(slot.master.slice(0, 0, 50), torch::full({50}, 100.0)));
  EXPECT_TRUE(torch::equal(slot.master.slice(0, 50), before.slice(0, 50)));
}

}  // namespace
}  // namespace torchfuse
