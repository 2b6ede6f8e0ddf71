// SPDX-License-Identifier: BSD-3-Clause
// A model that ranks train, each on its part of a batch, with whole gradients or with parts of
// them.
#pragma once

#include <torch/torch.h>
#include <torchfuse/parallel/distributed_data_parallel.h>
#include <torchfuse/parallel/sharded_optimizer.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "sharded_testing.h"

namespace torchfuse::sharded_testing {

/// With cuts of two and three ranks inside of parameters, and a scalar.
struct ScatteredNetImpl : torch::nn::Module {
  explicit ScatteredNetImpl(torch::ScalarType dtype = torch::kFloat) {
    first = register_module("first", torch::nn::Linear(6, 31));
    conv = register_module("conv", torch::nn::Conv1d(torch::nn::Conv1dOptions(1, 2, 3)));
    last = register_module("last", torch::nn::Linear(58, 3));
    gain = register_parameter("gain", torch::ones({}));
    const torch::NoGradGuard no_grad;
    double shift = 0.0;
    for (const torch::Tensor& param : parameters()) {
      param.copy_(waves(param.sizes(), shift += 1.0) * 0.5);
    }
    to(dtype);
  }

  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor hidden = torch::tanh(first(x)).unsqueeze(1);
    return last(conv(hidden).flatten(1)) * gain;
  }

  torch::nn::Linear first{nullptr};
  torch::nn::Conv1d conv{nullptr};
  torch::nn::Linear last{nullptr};
  torch::Tensor gain;
};
TORCH_MODULE(ScatteredNet);

using ScatteredModel = parallel::DistributedDataParallel<ScatteredNetImpl>;

/// Several buckets for the model above.
inline parallel::DistributedDataParallelOptions small_buckets() {
  return parallel::DistributedDataParallelOptions().first_bucket_bytes(64).bucket_bytes(256);
}

/// The loss of a rank's part of a batch.
inline torch::Tensor scattered_loss(ScatteredModel& model, std::int64_t rank, int step) {
  const torch::Tensor weight = model.module()->gain;
  const torch::Tensor x = waves({5, 6}, 10.0 * (step + 1) + static_cast<double>(rank));
  return model.forward(x.to(weight.scalar_type())).square().mean();
}

/// What training changes: parameters, in the model's order.
inline std::vector<torch::Tensor> values_of(const torch::nn::Module& module) {
  std::vector<torch::Tensor> values;
  for (const torch::Tensor& param : module.parameters()) values.push_back(param.detach().clone());
  return values;
}

}  // namespace torchfuse::sharded_testing
