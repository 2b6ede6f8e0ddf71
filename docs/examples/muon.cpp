// SPDX-License-Identifier: BSD-3-Clause
// Trains a model with Muon for the matrices and AdamW for the rest, saves the run and resumes it.
#include <torch/torch.h>
#include <torchfuse/torchfuse.h>

#include <cstdio>

using torchfuse::amp::AutocastGuard;
using torchfuse::amp::GradScaler;
using torchfuse::optim::FusedMuon;
using torchfuse::optim::FusedMuonOptions;

// A model that predicts the word after each of 16 words, with its optimizer and scaler.
struct Run {
  torch::nn::Sequential model{torch::nn::Embedding(16, 32), torch::nn::Linear(32, 32),
                              torch::nn::Functional(torch::tanh), torch::nn::Linear(32, 16)};
  FusedMuonOptions matrices = FusedMuonOptions(0.02).max_grad_norm(1.0);
  FusedMuonOptions others = FusedMuonOptions(3e-3).eps(1e-8).max_grad_norm(1.0);
  FusedMuon optimizer{FusedMuon::split(*model, matrices, others, {"3.weight"}), matrices};
  GradScaler scaler{torch::kCPU};

  double train(int steps) {
    const torch::Tensor words = torch::arange(16);
    torch::Tensor loss;
    for (int step = 0; step < steps; ++step) {
      optimizer.zero_grad();
      {
        const AutocastGuard autocast(torch::kCPU, torch::kHalf);
        loss = torch::cross_entropy_loss(model->forward(words), words.roll(1));
      }
      scaler.scale(loss).backward();
      scaler.step(optimizer);  // checks, unscales, clips and updates all parameters
      scaler.update();
    }
    return loss.item<double>();
  }

  torchfuse::Checkpoint checkpoint() {
    return torchfuse::Checkpoint().model(*model).optimizer(optimizer).scaler(scaler);
  }
};

int main() {
  torch::manual_seed(0);
  Run run;
  run.train(20);
  torchfuse::save_checkpoint("muon.pt", run.checkpoint());
  const double loss = run.train(20);

  Run resumed;
  torchfuse::load_checkpoint("muon.pt", resumed.checkpoint());
  const bool same = resumed.train(20) == loss;
  std::printf("muon.cpp: loss %.3f, %s\n", loss, same ? "the same when resumed" : "not resumed");
  return same && loss < 1.0 ? 0 : 1;
}
