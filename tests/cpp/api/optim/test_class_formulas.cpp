// SPDX-License-Identifier: BSD-3-Clause
// Every class against the fp64 formula of its functor, with options that differ from their
// defaults: each class passes its own options to its own algorithm.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include <torchfuse/torchfuse.h>

#include "../../kernels/optimizer_cases.h"
#include "optim_testing.h"

namespace torchfuse::optim {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace): all helpers
using torch::Tensor;

/// What the class must hand to the functor, whose formula tests/cpp/kernels has in fp64.
template <class Params, class Options>
Params params_of(const Options& options) {
  Params params;
  params.lr.value = options.lr();
  params.weight_decay.value = options.weight_decay();
  params.maximize = options.maximize();
  if constexpr (requires { options.betas(); }) {
    std::tie(params.beta1.value, params.beta2.value) = options.betas();
  }
  if constexpr (requires { options.eps(); }) params.eps.value = options.eps();
  if constexpr (requires { options.momentum(); }) {
    params.momentum.value = options.momentum();
    params.nesterov = options.nesterov();
  }
  if constexpr (requires { options.bias_correction(); }) {
    params.bias_correction = options.bias_correction();
  }
  if constexpr (requires { options.adam_w_mode(); }) params.adam_w_mode = options.adam_w_mode();
  if constexpr (requires { options.amsgrad(); }) params.amsgrad = options.amsgrad();
  if constexpr (requires { options.grad_averaging(); }) {
    params.grad_averaging = options.grad_averaging();
  }
  if constexpr (requires { options.use_nvlamb(); }) {
    constexpr double kNoLimit = std::numeric_limits<double>::infinity();
    params.use_nvlamb = options.use_nvlamb();
    params.min_trust_ratio.value = options.min_trust_ratio();
    params.max_trust_ratio.value = options.max_trust_ratio().value_or(kNoLimit);
  }
  if constexpr (requires { options.norm_type(); }) {
    params.reg_inside_moment = options.reg_inside_moment();
    params.inf_norm = options.norm_type() == 0;
    params.init_zero = options.init_zero();
  }
  if constexpr (requires { options.trust_coefficient(); }) {
    params.trust_coefficient.value = options.trust_coefficient();
  }
  if constexpr (requires { options.dampening(); }) {
    params.dampening.value = options.dampening();
    params.wd_after_momentum = options.wd_after_momentum();
  }
  if constexpr (requires { options.lr_decay(); }) {
    params.lr_decay.value = options.lr_decay();
    params.adagrad_w_mode = options.adagrad_w_mode();
  }
  return params;
}

std::vector<double> numbers_of(const Tensor& tensor) {
  const Tensor wide = tensor.detach().to(torch::kDouble).reshape({-1}).contiguous();
  return {wide.const_data_ptr<double>(), wide.const_data_ptr<double>() + wide.numel()};
}

template <class Options>
kernels::testing::ExactTensor begin_of(const Options& options, const Tensor& param) {
  kernels::testing::ExactTensor exact;
  exact.param = numbers_of(param);
  for (auto& state : exact.state) state.resize(exact.param.size());
  if constexpr (requires { options.initial_accumulator_value(); }) {
    for (double& sum : exact.state[0]) sum = options.initial_accumulator_value();
  }
  return exact;
}

/// 100 steps, each with masters where the parameters have 16 bits.
template <class Optimizer, class Functor>
void expect_follows(std::vector<typename Optimizer::options_t> all) {
  for (std::size_t index = 0; index < all.size(); ++index) {
    auto& options = all[index].master_weights(true).max_grad_norm(std::nullopt);
    const auto group = params_of<typename Functor::Params>(options);
    for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kBFloat16}) {
      SCOPED_TRACE(c10::str("options ", index, ", ", dtype));
      const auto params = make_params(dtype);
      Optimizer optimizer(params, options);
      std::vector<kernels::testing::ExactTensor> formulas;
      for (const Tensor& param : params) formulas.push_back(begin_of(options, param));
      for (int step = 0; step < 100; ++step) {
        set_grads(params, step);
        optimizer.step();
        for (std::size_t i = 0; i < params.size(); ++i) {
          formulas[i].grad = numbers_of(params[i].grad());
          kernels::testing::OptimizerCase<Functor>::step(group, step + 1.0, formulas[i]);
        }
      }
      for (std::size_t i = 0; i < params.size(); ++i) {
        const Tensor& master = state_of(optimizer, params[i]).master_param();
        ASSERT_EQ(master.defined(), dtype == torch::kBFloat16);
        expect_close(master.defined() ? master : params[i],
                     torch::tensor(formulas[i].param, torch::kDouble).view_as(params[i]));
        EXPECT_TRUE(!master.defined() || torch::equal(params[i], master.to(dtype)));
        EXPECT_EQ(state_of(optimizer, params[i]).step().template item<float>(), 100.0f);
      }
    }
  }
}

TEST(ClassFormulas, FusedAdam) {
  using Options = FusedAdamOptions;
  expect_follows<FusedAdam, kernels::Adam>(
      {Options(2e-3).weight_decay(0.05), Options(2e-3).adam_w_mode(false).weight_decay(0.05),
       Options(2e-3).amsgrad(true).betas({0.8, 0.95}).eps(1e-4),
       Options(2e-3).maximize(true).bias_correction(false)});
}

TEST(ClassFormulas, FusedLAMB) {
  using Options = FusedLAMBOptions;
  expect_follows<FusedLAMB, kernels::Lamb>(
      {Options(1e-3), Options(1e-3).weight_decay(0.0),
       Options(1e-3).weight_decay(0.0).use_nvlamb(true),
       Options(1e-3).adam_w_mode(false).bias_correction(false),
       Options(1e-3).grad_averaging(false).betas({0.8, 0.95}),
       Options(1e-3).min_trust_ratio(0.1).max_trust_ratio(0.5)});
}

TEST(ClassFormulas, FusedNovoGrad) {
  using Options = FusedNovoGradOptions;
  expect_follows<FusedNovoGrad, kernels::NovoGrad>(
      {Options(1e-3)
           .betas({0.95, 0.98})
           .bias_correction(false)
           .grad_averaging(false)
           .reg_inside_moment(true)
           .weight_decay(1e-3),
       Options(1e-3).weight_decay(0.01),
       Options(2e-4).norm_type(0).init_zero(true).maximize(true)});
}

TEST(ClassFormulas, FusedLARS) {
  using Options = FusedLARSOptions;
  expect_follows<FusedLARS, kernels::Lars>(
      {Options(0.2).weight_decay(0.05), Options(0.2).nesterov(true).maximize(true).eps(1.0),
       Options(0.02).momentum(0.0).trust_coefficient(0.02).weight_decay(0.01)});
}

TEST(ClassFormulas, FusedSGD) {
  using Options = FusedSGDOptions;
  expect_follows<FusedSGD, kernels::Sgd>(
      {Options(2e-4).weight_decay(0.05), Options(2e-4).momentum(0.9).dampening(0.1),
       Options(2e-4).momentum(0.9).nesterov(true).weight_decay(0.05),
       Options(2e-4).momentum(0.9).weight_decay(0.05).wd_after_momentum(true).maximize(true)});
}

TEST(ClassFormulas, FusedAdagrad) {
  using Options = FusedAdagradOptions;
  expect_follows<FusedAdagrad, kernels::Adagrad>(
      {Options(1e-3).lr_decay(0.01).initial_accumulator_value(0.5).weight_decay(0.05),
       Options(1e-3).weight_decay(0.05).adagrad_w_mode(true).maximize(true)});
}

TEST(ClassFormulas, FusedLion) {
  using Options = FusedLionOptions;
  expect_follows<FusedLion, kernels::Lion>(
      {Options(1e-3).weight_decay(0.1), Options(1e-3).betas({0.8, 0.95}).maximize(true)});
}

}  // namespace
}  // namespace torchfuse::optim
