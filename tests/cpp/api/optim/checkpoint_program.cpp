// SPDX-License-Identifier: BSD-3-Clause
// The C++ side of tests/python/convert/test_cpp_programs.py: goes on from the files that C++ or
// Python left in a folder, for some steps, and saves.
//
//   torchfuse_programs checkpoint CLASS FIRST LAST IN OUT [CLASS FIRST LAST IN OUT]...
//
// makes the steps FIRST to LAST - 1 of each run. IN and OUT are folders with optimizer.pt and
// params.pt. The Python side has the same gradients: torch's generator gives both the same numbers.
#include <torch/torch.h>

#include <cstdint>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include <torchfuse/torchfuse.h>

#include "../programs.h"

namespace checkpoint_program {
namespace {

using torch::optim::OptimizerParamGroup;

struct Job {
  int first;
  int last;
  std::string in;
  std::string out;
};

/// The last parameter never has a gradient, and so no state.
void set_grads(const std::vector<torch::Tensor>& params, std::uint64_t seed) {
  torch::manual_seed(seed);
  for (std::size_t i = 0; i + 1 < params.size(); ++i) {
    params[i].mutable_grad() = torch::randn(params[i].sizes()).to(params[i].scalar_type());
  }
}

void run(const torchfuse::optim::OptimizerClass& optimizer_class, const Job& job) {
  std::vector<torch::Tensor> params;
  torch::load(params, job.in + "/params.pt");
  for (torch::Tensor& param : params) param.requires_grad_(true);
  // The default options: those of the run have to come from the file.
  const auto optimizer = optimizer_class.make({
      OptimizerParamGroup(std::vector<torch::Tensor>(params.begin(), params.begin() + 2)),
      OptimizerParamGroup(std::vector<torch::Tensor>(params.begin() + 2, params.end())),
  });
  torch::load(*optimizer, job.in + "/optimizer.pt");
  for (int step = job.first; step < job.last; ++step) {
    set_grads(params, step);
    optimizer->step();
  }
  torch::save(*optimizer, job.out + "/optimizer.pt");
  for (torch::Tensor& param : params) param = param.detach();
  torch::save(params, job.out + "/params.pt");
}

const torchfuse::optim::OptimizerClass& find(
    const std::vector<torchfuse::optim::OptimizerClass>& classes, const std::string& name) {
  for (const auto& candidate : classes) {
    if (candidate.name == name) return candidate;
  }
  TORCH_CHECK(false, "expected a class of torchfuse, got ", name);
}

}  // namespace

void start(const Arguments& arguments) {
  TORCH_CHECK(!arguments.empty() && arguments.size() % 5 == 0,
              "expected CLASS FIRST LAST IN OUT, once or more often, got ", arguments.size(),
              " arguments.");
  const auto classes = torchfuse::optim::optimizer_classes();
  for (auto word = arguments.begin(); word != arguments.end(); word += 5) {
    std::cout << word[0] << " from " << word[3] << std::endl;
    run(find(classes, word[0]), {std::stoi(word[1]), std::stoi(word[2]), word[3], word[4]});
  }
}

}  // namespace checkpoint_program
