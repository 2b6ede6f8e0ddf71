// SPDX-License-Identifier: BSD-3-Clause
// One scaled step with the installed headers and library.
#include <torch/torch.h>
#include <torchfuse/torchfuse.h>

#include <cstdio>
#include <vector>

int main() {
  torch::Tensor weight = torch::ones({64}, torch::requires_grad());
  torchfuse::optim::FusedAdam optimizer(std::vector<torch::Tensor>{weight},
                                        torchfuse::optim::FusedAdamOptions(0.1));
  torchfuse::amp::GradScaler scaler(torch::Device(torch::kCPU));
  scaler.scale(weight.square().sum()).backward();
  scaler.step(optimizer);
  scaler.update();

  // The first Adam step moves every parameter by lr against the sign of its gradient.
  const double distance = (weight.detach() - 0.9).abs().max().item<double>();
  if (!(distance < 1e-4)) {
    std::fprintf(stderr, "consumer: expected every parameter near 0.9, got a distance of %g\n",
                 distance);
    return 1;
  }
  std::printf("consumer: one step with torchfuse %s and torch %s passed\n", TORCHFUSE_VERSION,
              TORCH_VERSION);
  return 0;
}
