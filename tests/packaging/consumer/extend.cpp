// SPDX-License-Identifier: BSD-3-Clause
// A second translation unit with all our headers, and an optimizer derived from ours.
#include <torch/optim/sgd.h>
#include <torchfuse/torchfuse.h>

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>

#include <limits>
#include <vector>

#include "consumer.h"

namespace {

using torchfuse::optim::FusedAdam;
using torchfuse::optim::FusedAdamOptions;
using torchfuse::optim::FusedOptimizer;

class CountingAdam : public FusedAdam {
 public:
  using FusedAdam::FusedAdam;
  void save(torch::serialize::OutputArchive& archive) const override {
    ++saved;
    FusedAdam::save(archive);
  }
  mutable int saved = 0;
};

void check_casts() {
  std::vector<at::Tensor> weights{at::ones({4}).requires_grad_()};
  CountingAdam ours(weights, FusedAdamOptions(0.1));
  torch::optim::SGD other(weights, torch::optim::SGDOptions(0.1));
  torch::optim::Optimizer* const base = &ours;
  torch::optim::Optimizer* const stranger = &other;
  EXPECT(dynamic_cast<FusedOptimizer*>(base) != nullptr, "ours is not recognized");
  EXPECT(dynamic_cast<FusedAdam*>(base) != nullptr, "ours is not recognized");
  EXPECT(dynamic_cast<FusedOptimizer*>(stranger) == nullptr, "SGD is taken for ours");
  torch::optim::OptimizerOptions& options = base->param_groups().front().options();
  EXPECT(dynamic_cast<FusedAdamOptions*>(&options) != nullptr, "options of another type");
}

/// The scaler lives in the library and recognizes a class that does not; torch calls its override.
void check_scaler_recognizes() {
  std::vector<at::Tensor> weights{at::ones({4}).requires_grad_()};
  CountingAdam optimizer(weights, FusedAdamOptions(0.1));
  torchfuse::amp::GradScaler scaler(at::Device(at::kCPU));
  scaler.scale(weights.front().sum()).backward();
  weights.front().mutable_grad().fill_(std::numeric_limits<float>::infinity());
  scaler.step(optimizer);
  EXPECT(optimizer.last_step_skipped().item<double>() == 1.0, "the step was not skipped inside");

  torch::serialize::OutputArchive archive;
  archive << static_cast<const torch::optim::Optimizer&>(optimizer);
  EXPECT(optimizer.saved == 1, "%d", optimizer.saved);
}

void check_exceptions() {
  bool caught = false;
  at::Tensor half = at::ones({2}, at::kHalf).requires_grad_();
  half.mutable_grad() = at::ones({2}, at::kHalf);
  torchfuse::amp::GradScalerCore core;
  core.initialize(at::kCPU, 1.0, 0);
  try {
    core.unscale_(1, {half}, core.inv_scale());
  } catch (const c10::ValueError&) {
    caught = true;
  }
  EXPECT(caught, "c10::ValueError did not arrive as itself");
}

}  // namespace

void check_extension() {
  check_casts();
  check_scaler_recognizes();
  check_exceptions();
}
