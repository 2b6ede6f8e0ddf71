// SPDX-License-Identifier: BSD-3-Clause
// The C++ side of tests/python/checkpoint/test_weights.py: loads a file into a module of that
// test's kind and writes the module to another file.
//
//   torchfuse_programs weights IN OUT
#include <torch/torch.h>

#include <torchfuse/weights.h>

#include <memory>

#include "../programs.h"

namespace weights_program {
namespace {

/// The output layer has the embedding's weight.
struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    register_module("embedding", embedding);
    register_module("norm", norm);
    register_module("head", head);
    head->register_parameter("weight", embedding->weight);
    head->register_parameter("bias", torch::zeros({5}));
  }
  torch::nn::Embedding embedding{5, 3};
  torch::nn::BatchNorm1d norm{3};
  std::shared_ptr<torch::nn::Module> head = std::make_shared<torch::nn::Module>();
};
TORCH_MODULE(Tied);

}  // namespace

void start(const Arguments& arguments) {
  TORCH_CHECK(arguments.size() == 2, "expected IN OUT, got ", arguments.size(), " arguments.");
  Tied module;
  const auto metadata = torchfuse::load_weights(arguments[0], *module);
  torchfuse::save_weights(arguments[1], *module, metadata);
}

}  // namespace weights_program
