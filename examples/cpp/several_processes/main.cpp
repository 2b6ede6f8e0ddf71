// SPDX-License-Identifier: BSD-3-Clause
// Trains in several processes in fp16: each has its part of the data, rank 0 logs and saves.
//
//   torchrun --no-python --nproc-per-node 2 ./several_processes <folder>
//
// The losses are those of examples/python/several_processes.py.
#include <torch/torch.h>
#include <torchfuse/torchfuse.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <iostream>
#include <optional>
#include <string>

namespace {

constexpr std::int64_t kEpochs = 12;
constexpr std::int64_t kBatch = 64;  // of all processes together

// 512 random points, labeled by the sign of their sum.
class Points : public torch::data::datasets::Dataset<Points> {
 public:
  torch::data::Example<> get(std::size_t index) override {
    const auto i = static_cast<std::int64_t>(index);
    return {data[i], target[i]};
  }
  std::optional<std::size_t> size() const override { return data.size(0); }

  torch::Tensor data = torch::randn({512, 16});
  torch::Tensor target = (data.sum(1) > 0).to(torch::kLong);
};

struct NetImpl : torch::nn::Module {
  NetImpl()
      : hidden(register_module("hidden", torch::nn::Linear(16, 32))),
        output(register_module("output", torch::nn::Linear(32, 2))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor inner = torch::relu(hidden(x));
    return output(inner);
  }

  torch::nn::Linear hidden;
  torch::nn::Linear output;
};
TORCH_MODULE(Net);

void train(const torchfuse::parallel::ProcessGroup& group, const std::string& out) {
  // A GPU for each process, or the CPU.
  const torch::Device device = group.backend() == "nccl"
                                   ? torch::Device(torch::kCUDA, group.local_rank())
                                   : torch::Device(torch::kCPU);
  torch::manual_seed(0);  // the same points and weights in all processes
  Points points;
  Net net;
  net->to(device);  // before it is wrapped

  torchfuse::parallel::DistributedDataParallel model(net, group);
  // weight_decay is 0 by default; torch's AdamW has 0.01
  const auto options = torchfuse::optim::FusedAdamOptions(1e-2).max_grad_norm(1.0);
  torchfuse::optim::FusedAdam optimizer(net->parameters(), options);
  torchfuse::amp::GradScaler scaler(device);
  const auto place = torchfuse::parallel::DistributedSamplerOptions()
                         .num_replicas(group.world_size())
                         .rank(group.rank());
  torchfuse::parallel::DistributedSampler sampler(points.data.size(0), place);
  const torch::data::DataLoaderOptions part(kBatch / group.world_size());
  const auto batches = points.map(torch::data::transforms::Stack<>());
  auto loader = torch::data::make_data_loader(batches, sampler, part);

  for (std::int64_t epoch = 0; epoch < kEpochs; ++epoch) {
    sampler.set_epoch(epoch);  // another order in each epoch
    torch::Tensor loss;
    for (auto& batch : *loader) {
      optimizer.zero_grad();
      {
        const torchfuse::amp::AutocastGuard autocast(device.type(), torch::kHalf);
        const torch::Tensor output = model.forward(batch.data.to(device));
        loss = torch::nn::functional::cross_entropy(output, batch.target.to(device));
      }
      scaler.scale(loss).backward();  // averages the gradients of all processes
      scaler.step(optimizer);         // checks, unscales, clips and updates
      scaler.update();
    }
    const torch::Tensor total = loss.detach().clone();
    torchfuse::all_reduce_(total, "sum", {group.name()});  // all processes call it
    if (group.rank() == 0) {
      const double mean = (total / group.world_size()).item<double>();
      std::cout << "epoch " << epoch + 1 << ": loss " << mean << '\n';
    }
  }

  if (group.rank() == 0) {
    std::filesystem::create_directories(out);
    torch::save(net, out + "/net.pt");
    torch::save(optimizer, out + "/optimizer.pt");
    torch::save(scaler, out + "/scaler.pt");
    const torch::NoGradGuard no_grad;
    const torch::Tensor guess = net->forward(points.data.to(device)).argmax(1).cpu();
    const torch::Tensor correct = (guess == points.target).to(torch::kDouble);
    std::cout << "accuracy " << correct.mean().item<double>() << '\n';
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: several_processes <folder>\n";
    return EXIT_FAILURE;
  }
  try {
    train(torchfuse::parallel::init_process_group(), argv[1]);
    return EXIT_SUCCESS;
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << '\n';
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
  }
  return EXIT_FAILURE;
}
