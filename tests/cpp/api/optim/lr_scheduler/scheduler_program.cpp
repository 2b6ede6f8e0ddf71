// SPDX-License-Identifier: BSD-3-Clause
// The C++ side of tests/python/checkpoint/test_cpp_schedulers.py: runs of every scheduler.
//
//   torchfuse_programs scheduler STEPS FOLDER
//
// FOLDER/CASE/python.pt is a checkpoint that Python saved after half of the steps. The program
// writes half.pt, its own checkpoint after half of the steps, and the rates and momenta of all
// steps to whole.pt, from_half.pt and from_python.pt. The Python side has the same cases.
#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <torchfuse/torchfuse.h>

#include "../../programs.h"

namespace scheduler_program {
namespace {

using namespace torchfuse::optim;  // NOLINT(google-build-using-namespace): all schedulers
using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;
using Scheduler = std::shared_ptr<LRScheduler>;

const std::vector<double> kRates{0.5, 0.02, 3e-4};

template <class Class, class Options>
std::unique_ptr<Optimizer> make_optimizer() {
  std::vector<OptimizerParamGroup> groups;
  for (const double rate : kRates) {
    groups.emplace_back(std::vector<torch::Tensor>{torch::ones({2}).requires_grad_(true)},
                        std::make_unique<Options>(rate));
  }
  return std::make_unique<Class>(groups, Options(1.0));
}

struct Case {
  std::function<Scheduler(Optimizer&)> scheduler;
  std::function<std::unique_ptr<Optimizer>()> optimizer =
      make_optimizer<torch::optim::SGD, torch::optim::SGDOptions>;
  std::function<double(OptimizerParamGroup&)> momentum = [](OptimizerParamGroup&) { return 0.0; };
};

template <class Options>
double beta1(OptimizerParamGroup& group) {
  return std::get<0>(static_cast<Options&>(group.options()).betas());
}

double sgd_momentum(OptimizerParamGroup& group) {
  return static_cast<torch::optim::SGDOptions&>(group.options()).momentum();
}

/// A case that needs only arguments.
template <class Class, class... Arguments>
Case of(Arguments... arguments) {
  return {[=](Optimizer& optimizer) { return std::make_shared<Class>(optimizer, arguments...); }};
}

Case sequential() {
  return {[](Optimizer& optimizer) -> Scheduler {
    return std::make_shared<SequentialLR>(
        optimizer,
        std::vector<Scheduler>{
            std::make_shared<LinearLR>(optimizer, 0.1, 1.0, 50),
            std::make_shared<CosineAnnealingLR>(optimizer, 200, 1e-5),
            std::make_shared<LambdaLR>(
                optimizer,
                [](std::int64_t epoch) { return 1.0 / (1.0 + static_cast<double>(epoch)); }),
            std::make_shared<MultiStepLR>(optimizer, std::vector<std::int64_t>{10, 100}, 0.5)},
        std::vector<std::int64_t>{50, 300, 620});
  }};
}

Case chained() {
  return {[](Optimizer& optimizer) -> Scheduler {
    return std::make_shared<ChainedScheduler>(
        std::vector<Scheduler>{std::make_shared<ConstantLR>(optimizer, 0.25, 20),
                               std::make_shared<ExponentialLR>(optimizer, 0.995)});
  }};
}

Case sequential_of_chained() {
  return {[](Optimizer& optimizer) -> Scheduler {
    auto chain = std::make_shared<ChainedScheduler>(
        std::vector<Scheduler>{std::make_shared<LinearLR>(optimizer, 0.2, 1.0, 30),
                               std::make_shared<ExponentialLR>(optimizer, 0.999)});
    return std::make_shared<SequentialLR>(
        optimizer,
        std::vector<Scheduler>{chain,
                               std::make_shared<CosineAnnealingWarmRestarts>(optimizer, 40, 2)},
        std::vector<std::int64_t>{100});
  }};
}

Case cyclic_sgd() {
  Case made = of<CyclicLR>(CyclicLROptions(std::vector<double>{0.01, 0.02, 0.03}, 0.9)
                               .step_size_up(70)
                               .step_size_down(31)
                               .mode("triangular2"));
  made.momentum = sgd_momentum;
  return made;
}

Case cyclic_fused_adam() {
  return {of<CyclicLR>(CyclicLROptions(1e-3, 0.1).step_size_up(64).mode("exp_range").gamma(0.999))
              .scheduler,
          make_optimizer<FusedAdam, FusedAdamOptions>, beta1<FusedAdamOptions>};
}

Case one_cycle_adamw() {
  return {of<OneCycleLR>(OneCycleLROptions(std::vector<double>{0.3, 0.2, 0.1}).total_steps(1000))
              .scheduler,
          make_optimizer<torch::optim::AdamW, torch::optim::AdamWOptions>,
          beta1<torch::optim::AdamWOptions>};
}

Case one_cycle_linear() {
  Case made = of<OneCycleLR>(OneCycleLROptions(0.4)
                                 .epochs(11)
                                 .steps_per_epoch(100)
                                 .pct_start(0.25)
                                 .anneal_strategy("linear")
                                 .three_phase(true));
  made.momentum = sgd_momentum;
  return made;
}

std::map<std::string, Case> cases() {
  const auto square_root = [](std::int64_t epoch) {
    return 1.0 / std::sqrt(1.0 + static_cast<double>(epoch));
  };
  const auto nearly_one = [](std::int64_t epoch) { return epoch % 2 == 0 ? 0.99 : 1.005; };
  const auto plateau =
      ReduceLROnPlateauOptions().factor(0.7).patience(4).cooldown(3).min_lr(1e-6).threshold(1e-3);
  return {
      {"LambdaLR", of<LambdaLR>(square_root)},
      {"MultiplicativeLR", of<MultiplicativeLR>(nearly_one)},
      {"StepLR", of<StepLR>(30, 0.9)},
      {"MultiStepLR", of<MultiStepLR>(std::vector<std::int64_t>{10, 30, 30, 600}, 0.3)},
      {"ConstantLR", of<ConstantLR>(0.3, 400)},
      {"LinearLR", of<LinearLR>(0.1, 0.9, 700)},
      {"LinearLR to zero", of<LinearLR>(1.0 / 3.0, 0.0, 777)},
      {"ExponentialLR", of<ExponentialLR>(0.99)},
      {"PolynomialLR", of<PolynomialLR>(900, 1.7)},
      {"CosineAnnealingLR", of<CosineAnnealingLR>(130, 1e-5)},
      {"CosineAnnealingWarmRestarts", of<CosineAnnealingWarmRestarts>(37, 2, 1e-6)},
      {"CyclicLR", cyclic_sgd()},
      {"CyclicLR of FusedAdam", cyclic_fused_adam()},
      {"OneCycleLR", one_cycle_adamw()},
      {"OneCycleLR of three lines", one_cycle_linear()},
      {"SequentialLR", sequential()},
      {"SequentialLR of a chain", sequential_of_chained()},
      {"ChainedScheduler", chained()},
      {"ReduceLROnPlateau", of<ReduceLROnPlateau>(plateau)},
  };
}

double metric(std::int64_t step) {
  return 1.0 + static_cast<double>(step * 7919 % 101) / 100.0 - 0.0005 * static_cast<double>(step);
}

struct Run {
  explicit Run(const Case& run_case)
      : described(run_case),
        optimizer(run_case.optimizer()),
        scheduler(run_case.scheduler(*optimizer)) {
    record();
  }

  void record() {
    for (OptimizerParamGroup& group : optimizer->param_groups()) {
      values.push_back(group.options().get_lr());
      values.push_back(described.momentum(group));
    }
  }

  /// At step 250 a program edits a rate.
  void steps(std::int64_t first, std::int64_t last) {
    for (std::int64_t step = first; step < last; ++step) {
      auto& options = optimizer->param_groups()[1].options();
      if (step == 250) options.set_lr(0.5 * options.get_lr());
      if (auto* plateau = dynamic_cast<ReduceLROnPlateau*>(scheduler.get())) {
        plateau->step(metric(step));
      } else {
        scheduler->step();
      }
      record();
    }
  }

  torchfuse::Checkpoint checkpoint() const {
    torchfuse::Checkpoint described;
    described.scheduler(*scheduler);
    if (auto* fused = dynamic_cast<FusedOptimizer*>(optimizer.get())) described.optimizer(*fused);
    return described;
  }

  void resume_from(const std::string& path) {
    torchfuse::load_checkpoint(path, checkpoint());
    auto& groups = optimizer->param_groups();
    for (std::size_t i = 0; i < groups.size(); ++i) {
      groups[i].options().set_lr(scheduler->get_last_lr()[i]);
    }
    values.clear();
  }

  void write(const std::string& path) const {
    const torch::Tensor all = torch::tensor(values, torch::kDouble).reshape({-1, 3, 2});
    torchfuse::save_checkpoint(path, torchfuse::Checkpoint().value("values", all));
  }

  const Case& described;
  std::unique_ptr<Optimizer> optimizer;
  Scheduler scheduler;
  std::vector<double> values;
};

void run(const Case& run_case, std::int64_t steps, const std::string& folder) {
  Run whole(run_case);
  whole.steps(0, steps / 2);
  torchfuse::save_checkpoint(folder + "/half.pt", whole.checkpoint());
  whole.steps(steps / 2, steps);
  whole.write(folder + "/whole.pt");
  for (const std::string& start : {std::string("half"), std::string("python")}) {
    Run resumed(run_case);
    resumed.resume_from(folder + "/" + start + ".pt");
    resumed.steps(steps / 2, steps);
    resumed.write(folder + "/from_" + start + ".pt");
  }
}

}  // namespace

void start(const Arguments& arguments) {
  TORCH_CHECK(arguments.size() == 2, "expected STEPS FOLDER, got ", arguments.size(),
              " arguments.");
  for (const auto& [name, described] : cases()) {
    std::cout << name << std::endl;
    run(described, std::stoll(arguments[0]), arguments[1] + "/" + name);
  }
}

}  // namespace scheduler_program
