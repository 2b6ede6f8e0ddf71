// SPDX-License-Identifier: BSD-3-Clause
// Saves an optimizer of each class in each state that a run begins with, or goes on from such
// files:
//
//   torchfuse_programs optimizers - TO          saves TO/<class>-<state>.pt
//   torchfuse_programs optimizers FROM TO       loads these of FROM, makes two steps, and saves in
//   TO
//
// tests/python/checkpoint/test_first_states.py does the same in Python, and compares.
#include <torch/torch.h>
#include <torchfuse/torchfuse.h>

#include <limits>
#include <string>
#include <vector>

#include "../programs.h"

namespace optimizers_program {
namespace {

using namespace torchfuse::optim;  // NOLINT(google-build-using-namespace)

/// Vectors; for FusedMuon, matrices around a vector.
std::vector<torch::Tensor> params(bool matrices) {
  std::vector<torch::Tensor> made;
  for (int index = 0; index < 3; ++index) {
    const torch::Tensor value = torch::full({3}, 1.0F + 0.5F * static_cast<float>(index));
    made.push_back((matrices && index != 1 ? value.repeat({2, 1}) : value).requires_grad_());
  }
  return made;
}

void set_gradients(const std::vector<torch::Tensor>& params, double value, bool is_frozen) {
  for (std::size_t index = 0; index < params.size(); ++index) {
    if (is_frozen && index + 1 == params.size()) continue;
    params[index].mutable_grad() =
        torch::full_like(params[index], value * (1.0 + static_cast<double>(index)));
  }
}

template <class Optimizer, class Options>
void run(const std::string& name, const Options& options, const Arguments& folders) {
  for (const std::string state : {"fresh", "skipped", "frozen"}) {
    const std::string file = "/" + name + "-" + state + ".pt";
    const auto own = params(name == "FusedMuon");
    Optimizer optimizer(own, options);
    torchfuse::amp::GradScaler scaler(torch::Device(torch::kCPU));
    scaler.scale(torch::ones({}));
    auto checkpoint = torchfuse::Checkpoint().optimizer(optimizer);
    const bool is_frozen = state == "frozen";
    if (folders[0] != "-") {
      torchfuse::load_checkpoint(folders[0] + file, checkpoint);
      for (int step = 0; step < 2; ++step) {
        set_gradients(own, 0.25, is_frozen);
        optimizer.step();
      }
    } else if (state == "skipped") {
      set_gradients(own, std::numeric_limits<double>::infinity(), is_frozen);
      scaler.step(optimizer);
    } else if (is_frozen) {
      set_gradients(own, 0.5, is_frozen);
      optimizer.step();
    }
    std::vector<torch::Tensor> values;
    for (const torch::Tensor& param : own) values.push_back(param.flatten());
    torchfuse::save_checkpoint(folders[1] + file, checkpoint.value("params", torch::cat(values)));
  }
}

}  // namespace

void start(const Arguments& arguments) {
  TORCH_CHECK(arguments.size() == 2, "expected FROM TO, got ", arguments.size(), " arguments.");
  run<FusedAdagrad>("FusedAdagrad", FusedAdagradOptions(0.1), arguments);
  run<FusedAdam>("FusedAdam", FusedAdamOptions(0.1).amsgrad(true), arguments);
  run<FusedLAMB>("FusedLAMB", FusedLAMBOptions(0.1), arguments);
  run<FusedLARS>("FusedLARS", FusedLARSOptions(0.1), arguments);
  run<FusedLion>("FusedLion", FusedLionOptions(0.1), arguments);
  run<FusedMuon>("FusedMuon",
                 FusedMuonOptions(0.1)
                     .ns_dtype(torch::kFloat)
                     .adjust_lr_fn("match_rms_adamw")
                     .ns_coefficients({3.0, -3.2, 1.2}),
                 arguments);
  run<FusedNovoGrad>("FusedNovoGrad", FusedNovoGradOptions(0.1), arguments);
  run<FusedSGD>("FusedSGD", FusedSGDOptions(0.1).momentum(0.9).dampening(0.1), arguments);
}

}  // namespace optimizers_program
