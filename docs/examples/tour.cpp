// SPDX-License-Identifier: BSD-3-Clause
// Every C++ line that the documentation sets against a Python line, compiled and run.
#include <torch/torch.h>
#include <torchfuse/torchfuse.h>

#include <cstdio>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using torch::optim::OptimizerParamGroup;
using torchfuse::clip_grad_norm_;
using torchfuse::clip_grad_value_;
using torchfuse::amp::AutocastGuard;
using torchfuse::amp::CustomBackward;
using torchfuse::amp::CustomForward;
using torchfuse::amp::GradScaler;
using torchfuse::amp::GradScalerOptions;
using torchfuse::nn::SyncBatchNorm;
using torchfuse::nn::SyncBatchNormOptions;
using torchfuse::optim::CosineAnnealingLR;
using torchfuse::optim::EmaWeights;
using torchfuse::optim::FusedAdam;
using torchfuse::optim::FusedAdamOptions;
using torchfuse::optim::LinearLR;
using torchfuse::optim::SequentialLR;
using torchfuse::optim::StepLR;
using torchfuse::parallel::convert_sync_batch_norm;

static void save_and_load(torch::nn::Linear& model, FusedAdam& optimizer, GradScaler& scaler) {
  // [save]
  torch::save(model, "model.pt");
  torch::save(optimizer, "optimizer.pt");
  torch::save(scaler, "scaler.pt");
  // In the next run, when all three have been built as before:
  torch::load(model, "model.pt");
  torch::load(optimizer, "optimizer.pt");
  torch::load(scaler, "scaler.pt");
  // [end of save]
}

// Two groups: the first with its own options.
static void make_groups(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  const std::vector<OptimizerParamGroup> groups{
      OptimizerParamGroup(a, std::make_unique<FusedAdamOptions>(0.1)), OptimizerParamGroup(b)};
  FusedAdam(groups, FusedAdamOptions(1e-3).weight_decay(0.01).betas({0.9, 0.95}));
}

static torch::Tensor evaluate(torch::nn::Linear& model, FusedAdam& optimizer,
                              const torch::Tensor& data) {
  const torch::NoGradGuard no_grad;
  torch::Tensor prediction;
  // [averages]
  {
    const EmaWeights averages(optimizer);  // until the end of this scope
    prediction = model->forward(data);
    torchfuse::save_weights("averages.safetensors", *model);
  }
  // [end of averages]
  return prediction;
}

// [function]
struct Square : torch::autograd::Function<Square> {
  static torch::Tensor forward(AutogradContext* ctx, torch::Tensor x) {
    const CustomForward amp(ctx, torch::kCPU, torch::kFloat);
    x = amp.cast(x);
    ctx->save_for_backward({x});
    return x * x;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const CustomBackward amp(ctx, torch::kCPU);
    return {2 * ctx->get_saved_variables()[0] * grads[0]};
  }
};
// [end of function]

// [scheduler]
// A warm-up of 5 epochs, and half a cosine over the other 95.
static double train_with_schedule(torch::nn::Linear& model, const torch::Tensor& data,
                                  const torch::Tensor& target) {
  FusedAdam optimizer(model->parameters(), FusedAdamOptions(1e-3));
  SequentialLR scheduler(optimizer,
                         {std::make_shared<LinearLR>(optimizer, 0.1, 1.0, 5),
                          std::make_shared<CosineAnnealingLR>(optimizer, 95)},
                         {5});
  for (int epoch = 0; epoch < 100; ++epoch) {
    optimizer.zero_grad();
    torch::mse_loss(model->forward(data), target).backward();
    optimizer.step();
    scheduler.step();
  }
  torch::save(scheduler, "scheduler.pt");
  return scheduler.get_last_lr()[0];
}
// [end of scheduler]

static double decay(FusedAdam& optimizer) {
  StepLR scheduler(optimizer, 30, 0.1);
  for (int epoch = 0; epoch < 30; ++epoch) scheduler.step();
  return scheduler.get_last_lr()[0];
}

// One iteration in mixed precision with everything in it; the norm before clipping.
static torch::Tensor iterate(torch::nn::Linear& model, const torch::Tensor& data,
                             const torch::Tensor& target) {
  FusedAdam optimizer(model->parameters(), FusedAdamOptions(1e-3));
  GradScaler scaler(torch::kCPU, GradScalerOptions().init_scale(1024.0));
  torch::Tensor output;
  torch::Tensor loss;
  {
    AutocastGuard autocast(torch::kCPU, torch::kHalf);
    output = model->forward(data);
    output = Square::apply(output);
    {
      const auto island = AutocastGuard::disabled(torch::kCPU);
      loss = torch::mse_loss(output.to(torch::kFloat), target);
    }
  }
  scaler.scale(loss).backward();
  scaler.unscale_(optimizer);
  const torch::Tensor norm = clip_grad_norm_(model->parameters(), 1.0);
  clip_grad_value_(model->parameters(), 0.5);
  scaler.step(optimizer);
  scaler.update();
  optimizer.zero_grad();
  std::printf("scale %g, %lld skipped\n", scaler.get_scale(),
              static_cast<long long>(scaler.skipped_steps()));
  return norm;
}

// The same norm, of a step that clips inside.
static torch::Tensor iterate_folded(torch::nn::Linear& model, const torch::Tensor& data,
                                    const torch::Tensor& target) {
  FusedAdam optimizer(model->parameters(), FusedAdamOptions(1e-3).max_grad_norm(1.0));
  torch::mse_loss(model->forward(data), target).backward();
  optimizer.step();
  optimizer.zero_grad();
  return optimizer.grad_norm();
}

// Layers that share batch statistics over a process group; with an empty name they do not.
static bool normalize(const std::string& group_name) {
  SyncBatchNorm norm(SyncBatchNormOptions(64).fuse_relu(true));
  torch::nn::Sequential model(norm);
  convert_sync_batch_norm(*model, group_name);
  return model->forward(torch::randn({4, 64})).min().item<float>() >= 0.0F;
}

int main() {
  torch::manual_seed(0);  // some weights leave gradients too small to clip
  torch::nn::Linear model(8, 2);
  FusedAdam optimizer(model->parameters(), FusedAdamOptions(1e-3));
  GradScaler scaler(torch::kCPU, GradScalerOptions().init_scale(1024.0).growth_interval(500));
  make_groups({model->weight}, {model->bias});

  torch::Tensor loss;
  optimizer.zero_grad();
  {
    AutocastGuard autocast(torch::kCPU, torch::kHalf);
    loss = model->forward(torch::ones({4, 8})).square().mean();
  }
  scaler.scale(loss).backward();
  scaler.step(optimizer);
  scaler.update();
  save_and_load(model, optimizer, scaler);

  optimizer.zero_grad();
  model->forward(torch::ones({4, 8})).square().mean().backward();
  std::vector<torch::Tensor> gradients;
  for (const torch::Tensor& parameter : model->parameters()) gradients.push_back(parameter.grad());
  const torch::Tensor norm = std::get<0>(torchfuse::multi_tensor_l2_norm(gradients));
  optimizer.step();

  const torch::Tensor data = torch::ones({4, 8});
  const torch::Tensor target = torch::full({4, 2}, 3.0);
  const bool clipped = iterate(model, data, target).item<double>() > 1.0 &&
                       iterate_folded(model, data, target).item<double>() > 1.0;

  FusedAdam with_averages(model->parameters(), FusedAdamOptions(0.5).ema_decay(0.9));
  with_averages.zero_grad();
  model->forward(data).sum().backward();
  with_averages.step();
  const torch::Tensor averaged = evaluate(model, with_averages, data);
  const bool evaluated = !torch::allclose(averaged, model->forward(data));
  torchfuse::load_weights("averages.safetensors", *model);
  const bool loaded = torch::equal(averaged, model->forward(data).detach());

  const bool scheduled =
      train_with_schedule(model, data, target) < 1e-12 && decay(optimizer) < 2e-4;
  const bool stepped = optimizer.last_step_skipped().item<float>() == 0.0F;
  std::printf("tour.cpp: norm %.3f, %s\n", norm.item<double>(), stepped ? "stepped" : "skipped");
  const bool worked = stepped && clipped && scheduled && evaluated && loaded && normalize("");
  return worked && norm.item<double>() > 0.0 ? 0 : 1;
}
