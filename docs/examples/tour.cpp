// SPDX-License-Identifier: BSD-3-Clause
// Every C++ line that the documentation sets against a Python line, compiled and run.
#include <torch/torch.h>
#include <torchfuse/torchfuse.h>

#include <cstdio>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

using torch::optim::OptimizerParamGroup;
using torchfuse::amp::AutocastGuard;
using torchfuse::amp::GradScaler;
using torchfuse::amp::GradScalerOptions;
using torchfuse::optim::FusedAdam;
using torchfuse::optim::FusedAdamOptions;

static void save_and_load(FusedAdam& optimizer, GradScaler& scaler) {
  // [save]
  torch::save(optimizer, "optimizer.pt");
  torch::save(scaler, "scaler.pt");
  // In the next run, when both have been built over the same parameters:
  torch::load(optimizer, "optimizer.pt");
  torch::load(scaler, "scaler.pt");
  // [end of save]
}

// Two groups: the first with options of its own.
static void make_groups(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  const std::vector<OptimizerParamGroup> groups{
      OptimizerParamGroup(a, std::make_unique<FusedAdamOptions>(0.1)), OptimizerParamGroup(b)};
  FusedAdam(groups, FusedAdamOptions(1e-3).weight_decay(0.01).betas({0.9, 0.95}));
}

int main() {
  torch::nn::Linear model(8, 2);
  FusedAdam optimizer(model->parameters(), FusedAdamOptions(1e-3));
  GradScaler scaler(torch::kCPU, GradScalerOptions().growth_interval(500));
  make_groups({model->weight}, {model->bias});

  torch::Tensor loss;
  optimizer.zero_grad();
  {
    AutocastGuard autocast(torch::kCPU, torch::kBFloat16);
    loss = model->forward(torch::ones({4, 8})).square().mean();
  }
  scaler.scale(loss).backward();
  scaler.step(optimizer);
  scaler.update();
  save_and_load(optimizer, scaler);

  optimizer.zero_grad();
  model->forward(torch::ones({4, 8})).square().mean().backward();
  std::vector<torch::Tensor> gradients;
  for (const torch::Tensor& parameter : model->parameters()) gradients.push_back(parameter.grad());
  const torch::Tensor norm = std::get<0>(torchfuse::multi_tensor_l2_norm(gradients));
  optimizer.step();

  const bool stepped = optimizer.last_step_skipped().item<float>() == 0.0F;
  std::printf("tour.cpp: norm %.3f, %s\n", norm.item<double>(), stepped ? "stepped" : "skipped");
  return stepped && norm.item<double>() > 0.0 ? 0 : 1;
}
