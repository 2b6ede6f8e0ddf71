// SPDX-License-Identifier: BSD-3-Clause
// Steps over several small batches, and evaluation, in fp16, in one process or several.
//
//   torchrun --no-python --nproc-per-node 2 ./gradient_accumulation <parts>
//
// The losses are those of one large batch (1 part), up to rounding.
#include <torch/torch.h>
#include <torchfuse/torchfuse.h>

#include <cstdint>
#include <cstdlib>
#include <exception>
#include <iostream>

namespace {

constexpr std::int64_t kSteps = 96;
constexpr std::int64_t kBatch = 64;  // of one step, of all processes together

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

using Model = torchfuse::parallel::DistributedDataParallel<NetImpl>;

// [step]
// One step whose batch does not fit into memory at once: its loss.
torch::Tensor step(Model& model, torchfuse::optim::FusedAdam& optimizer,
                   torchfuse::amp::GradScaler& scaler, const torch::Tensor& data,
                   const torch::Tensor& target, std::int64_t parts) {
  optimizer.zero_grad();
  const auto inputs = data.chunk(parts);
  const auto labels = target.chunk(parts);
  torch::Tensor total = torch::zeros({}, data.options());
  for (std::int64_t part = 0; part < parts; ++part) {
    // Gradients add up in this process; the backward of the last part averages the sums.
    const auto local = model.no_sync(part + 1 < parts);
    torch::Tensor loss;
    {
      const torchfuse::amp::AutocastGuard autocast(data.device().type(), torch::kHalf);
      const torch::Tensor output = model.forward(inputs[part]);
      loss = torch::nn::functional::cross_entropy(output, labels[part]) / parts;
    }
    scaler.scale(loss).backward();
    total += loss.detach();
  }
  scaler.step(optimizer);  // checks, unscales, clips and updates, once for all parts
  scaler.update();         // the scale stays the same within a step
  return total;
}
// [end of step]

// [evaluate]
// The fraction of points that are labeled as they should be.
double evaluate(Net& net, const torch::Tensor& data, const torch::Tensor& target) {
  net->eval();
  const torch::NoGradGuard no_grad;
  torch::Tensor guess;
  {
    const torchfuse::amp::AutocastGuard autocast(data.device().type(), torch::kHalf);
    guess = net->forward(data).argmax(1);  // the module, not the DistributedDataParallel
  }
  net->train();
  return (guess == target).to(torch::kDouble).mean().item<double>();
}
// [end of evaluate]

void train(const torchfuse::parallel::ProcessGroup& group, std::int64_t parts) {
  const torch::Device device = group.backend() == "nccl"
                                   ? torch::Device(torch::kCUDA, group.local_rank())
                                   : torch::Device(torch::kCPU);
  torch::manual_seed(0);  // the same points and weights in all processes
  const torch::Tensor points = torch::randn({1024, 16}).to(device);
  const torch::Tensor labels = (points.sum(1) > 0).to(torch::kLong);
  Net net;
  net->to(device);  // before it is wrapped

  Model model(net, group);
  // weight_decay is 0 by default; torch's AdamW has 0.01
  const auto options = torchfuse::optim::FusedAdamOptions(1e-2).max_grad_norm(1.0);
  torchfuse::optim::FusedAdam optimizer(net->parameters(), options);
  torchfuse::amp::GradScaler scaler(device);

  const std::int64_t held_out = points.size(0) / 2;
  const std::int64_t own = kBatch / group.world_size();
  for (std::int64_t done = 0; done < kSteps; ++done) {
    const std::int64_t first = done * kBatch % held_out + group.rank() * own;
    const torch::Tensor loss = step(model, optimizer, scaler, points.narrow(0, first, own),
                                    labels.narrow(0, first, own), parts);
    if ((done + 1) % 8 != 0) continue;
    torchfuse::all_reduce_(loss, "sum", {group.name()});  // all processes call it
    if (group.rank() != 0) continue;
    const double accuracy =
        evaluate(net, points.narrow(0, held_out, held_out), labels.narrow(0, held_out, held_out));
    std::cout << "step " << done + 1 << ": loss " << (loss / group.world_size()).item<double>()
              << ", accuracy " << accuracy << '\n';
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::int64_t parts = argc == 2 ? std::atol(argv[1]) : 0;
  if (parts < 1) {
    std::cerr << "usage: gradient_accumulation <parts of each batch, at least 1>\n";
    return EXIT_FAILURE;
  }
  try {
    train(torchfuse::parallel::init_process_group(), parts);
    return EXIT_SUCCESS;
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << '\n';
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
  }
  return EXIT_FAILURE;
}
