// SPDX-License-Identifier: BSD-3-Clause
// Optimizers with two groups, and runs of schedulers against formulas.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/optim/lr_scheduler.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../optim_testing.h"

namespace torchfuse::testing {

using Rates = std::vector<double>;

inline const Rates& base_rates() {
  static const Rates rates{0.5, 0.02};
  return rates;
}

/// An optimizer of one parameter in each of two groups, with rates of their own.
template <class Optimizer = torch::optim::SGD, class Options = torch::optim::SGDOptions>
Optimizer two_groups(const Rates& rates = base_rates()) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const double rate : rates) {
    groups.emplace_back(std::vector<torch::Tensor>{torch::ones({2, 1}).requires_grad_(true)},
                        std::make_unique<Options>(rate));
  }
  return Optimizer(groups, Options(1.0));
}

inline Rates rates_of(torch::optim::Optimizer& optimizer) {
  Rates rates;
  for (auto& group : optimizer.param_groups()) rates.push_back(group.options().get_lr());
  return rates;
}

/// Both are within `tolerance` times the base rates.
inline void expect_rates(const Rates& actual, const Rates& expected, double tolerance = 1e-12) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    EXPECT_NEAR(actual[i], expected[i], tolerance * base_rates()[i]) << "group " << i;
  }
}

/// A new scheduler goes on as the saved one does, over `steps` epochs.
template <class Make>
void expect_resumes(const Make& make, std::int64_t before, std::int64_t after) {
  auto first = two_groups();
  const std::shared_ptr<optim::LRScheduler> whole = make(first);
  for (std::int64_t i = 0; i < before; ++i) whole->step();
  auto second = two_groups();
  const std::shared_ptr<optim::LRScheduler> resumed = make(second);
  load(*resumed, saved(*whole));
  ASSERT_EQ(resumed->get_last_lr(), whole->get_last_lr());
  // The rates are in the optimizer's checkpoint.
  for (std::size_t i = 0; i < 2; ++i) {
    second.param_groups()[i].options().set_lr(first.param_groups()[i].options().get_lr());
  }
  for (std::int64_t i = 0; i < after; ++i) {
    whole->step();
    resumed->step();
    ASSERT_EQ(rates_of(second), rates_of(first)) << "step " << i << " after the load";
    ASSERT_EQ(resumed->last_epoch(), whole->last_epoch());
  }
}

}  // namespace torchfuse::testing
