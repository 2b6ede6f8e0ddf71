// SPDX-License-Identifier: BSD-3-Clause
// Masters of 16-bit parameters. Remainders: tests/cpp/api/optim/test_fused_adam_storage.cpp.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/masters.h>

#include <string>

namespace torchfuse {
namespace {

TEST(RemakeMaster, ChangesOnlyWhatDoesNotRoundToTheParameter) {
  const at::Tensor master = torch::randn({1000});
  const at::Tensor kept = master.clone();
  const at::Tensor param = master.to(at::kBFloat16);
  remake_master(param, master);
  EXPECT_TRUE(torch::equal(master, kept));
  param.slice(0, 0, 10).fill_(3.0);
  remake_master(param, master);
  EXPECT_TRUE(torch::equal(master.slice(0, 0, 10), torch::full({10}, 3.0)));
  EXPECT_TRUE(torch::equal(master.slice(0, 10), kept.slice(0, 10)));
  std::string message;
  try {
    remake_master(master, master);
  } catch (const c10::Error& error) {
    message = error.what_without_backtrace();
  }
  EXPECT_NE(message.find("expected param to be of dtype"), std::string::npos) << message;
}

}  // namespace
}  // namespace torchfuse
