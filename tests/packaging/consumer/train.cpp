// SPDX-License-Identifier: BSD-3-Clause
// Registered ops, training and autocast, with all of torch's headers.
#include <torch/torch.h>
#include <torchfuse/torchfuse.h>

#include <ATen/core/dispatch/Dispatcher.h>

#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "consumer.h"

void check_ops(const std::set<std::string>& expected) {
  EXPECT(!expected.empty(), "the names of all ops, got none");
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const std::string& name : expected) {
    EXPECT(dispatcher.findSchema({"torchfuse::" + name, ""}).has_value(), "no schema of %s",
           name.c_str());
  }
  std::set<std::string> registered;
  for (const c10::OperatorName& op : dispatcher.getAllOpNames()) {
    const std::string prefix = "torchfuse::";
    if (op.name.compare(0, prefix.size(), prefix) == 0) {
      registered.insert(op.name.substr(prefix.size()));
    }
  }
  EXPECT(registered == expected, "%zu ops are registered, %zu were named", registered.size(),
         expected.size());
}

namespace {

/// Adam on loss = x^2 in double precision: what every element must be after `steps` steps.
double adam_on_a_square(int steps, double x, double lr) {
  double m = 0;
  double v = 0;
  for (int step = 1; step <= steps; ++step) {
    const double gradient = 2 * x;
    m += 0.1 * (gradient - m);
    v += 0.001 * (gradient * gradient - v);
    const double m_hat = m / (1 - std::pow(0.9, step));
    const double v_hat = v / (1 - std::pow(0.999, step));
    x -= lr * m_hat / (std::sqrt(v_hat) + 1e-8);
  }
  return x;
}

}  // namespace

void check_training() {
  const int steps = 20;
  torch::Tensor weight = torch::ones({64}, torch::requires_grad());
  torchfuse::optim::FusedAdam optimizer(std::vector<torch::Tensor>{weight},
                                        torchfuse::optim::FusedAdamOptions(0.01));
  torchfuse::amp::GradScaler scaler(torch::Device(torch::kCPU));
  double previous = std::numeric_limits<double>::infinity();
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    const torch::Tensor loss = weight.square().sum();
    EXPECT(loss.item<double>() < previous, "%g after %g", loss.item<double>(), previous);
    previous = loss.item<double>();
    scaler.scale(loss).backward();
    scaler.step(optimizer);
    scaler.update();
  }
  const double expected = adam_on_a_square(steps, 1.0, 0.01);
  const double distance = (weight.detach() - expected).abs().max().item<double>();
  EXPECT(distance < 1e-5, "%g from %g", distance, expected);

  weight.mutable_grad().fill_(std::numeric_limits<float>::infinity());
  const torch::Tensor before = weight.detach().clone();
  scaler.step(optimizer);
  scaler.update();
  EXPECT(torch::equal(weight.detach(), before), "an overflow changed the parameters");
  EXPECT(scaler.get_scale() == 32768.0, "a scale of %g", scaler.get_scale());
}

void check_autocast() {
  const torch::Tensor matrix = torch::ones({4, 4});
  {
    torchfuse::amp::AutocastGuard autocast(torch::kCPU, torch::kBFloat16);
    EXPECT(torch::matmul(matrix, matrix).scalar_type() == torch::kBFloat16, "autocast is off");
  }
  EXPECT(torch::matmul(matrix, matrix).scalar_type() == torch::kFloat, "autocast stayed on");
}
