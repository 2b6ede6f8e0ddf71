// SPDX-License-Identifier: BSD-3-Clause
// FusedLARS against its formula in fp64; archives, errors.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include <torchfuse/optim/fused_lars.h>

#include "optim_testing.h"

namespace torchfuse::optim {
namespace {

using testing::copy_of;
using testing::expect_close;
using testing::expect_equal;
using testing::expect_error;
using testing::make_params;
using testing::run_steps;
using testing::set_grads;
using Options = FusedLARSOptions;

FusedLARSParamState& state_of(FusedLARS& optimizer, const torch::Tensor& param) {
  return static_cast<FusedLARSParamState&>(*optimizer.state().at(param.unsafeGetTensorImpl()));
}

Options& options_of(FusedLARS& optimizer) {
  return static_cast<Options&>(optimizer.param_groups()[0].options());
}

/// One tensor in fp64.
struct Reference {
  torch::Tensor param, buffer;

  void update(const Options& options, const torch::Tensor& grad) {
    const double size = param.norm().item<double>();
    const double slope = grad.norm().item<double>();
    double rate = options.lr();
    if (size != 0.0 && slope != 0.0) {
      rate *= options.trust_coefficient() * size /
              (slope + options.weight_decay() * size + options.eps());
    }
    const torch::Tensor change =
        rate * ((options.maximize() ? -grad : grad) + options.weight_decay() * param);
    buffer = options.momentum() * buffer + change;
    param = param - (options.nesterov() ? change + options.momentum() * buffer : buffer);
  }
};

TEST(FusedLARS, FollowsTheFormulaOver100Steps) {
  std::vector<Options> all{Options(0.2).weight_decay(0.05),
                           Options(0.2).nesterov(true).maximize(true).eps(1.0),
                           Options(0.02).momentum(0.0).trust_coefficient(0.02).weight_decay(0.01)};
  for (Options& options : all) {
    options.master_weights(true);
    for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kBFloat16}) {
      const auto params = make_params(dtype);
      FusedLARS optimizer(params, options);
      std::vector<Reference> references;
      for (const auto& param : params) {
        const torch::Tensor start = param.detach().to(torch::kDouble).clone();
        references.push_back({start, torch::zeros_like(start)});
      }
      for (int i = 0; i < 100; ++i) {
        set_grads(params, i);
        optimizer.step();
        for (std::size_t k = 0; k < params.size(); ++k) {
          references[k].update(options, params[k].grad().to(torch::kDouble));
        }
      }
      for (std::size_t k = 0; k < params.size(); ++k) {
        const torch::Tensor& master = state_of(optimizer, params[k]).master_param();
        ASSERT_EQ(master.defined(), dtype == torch::kBFloat16);
        expect_close(master.defined() ? master : params[k], references[k].param);
      }
    }
  }
}

TEST(FusedLARS, TheLocalRateIsOneWhereANormIsZero) {
  const torch::Tensor zeros = torch::zeros({5}).requires_grad_(true);
  const torch::Tensor ones = torch::ones({5}).requires_grad_(true);
  FusedLARS optimizer(std::vector<torch::Tensor>{zeros, ones}, Options(0.5).weight_decay(0.25));
  zeros.mutable_grad() = torch::ones({5});
  ones.mutable_grad() = torch::zeros({5});
  optimizer.step();
  EXPECT_TRUE(torch::equal(zeros, torch::full({5}, -0.5)));
  EXPECT_TRUE(torch::equal(ones, torch::full({5}, 0.875)));
}

TEST(FusedLARS, ASkippedStepLeavesNoTrace) {
  const auto params = make_params();
  const auto expected = copy_of(params);
  FusedLARS optimizer(params, Options(2.0).skip_non_finite(true));
  FusedLARS reference(expected, Options(2.0));
  set_grads(params, 0);
  params[4].grad().view(-1)[209] = std::numeric_limits<float>::quiet_NaN();
  optimizer.step();
  EXPECT_EQ(optimizer.last_step_skipped().item<float>(), 1.0f);
  run_steps(optimizer, params, 1, 4);
  run_steps(reference, expected, 1, 4);
  expect_equal(params, expected);
}

std::string saved(const FusedLARS& optimizer) {
  std::ostringstream stream;
  torch::save(optimizer, stream);
  return stream.str();
}

void load(FusedLARS& optimizer, const std::string& bytes) {
  std::istringstream stream(bytes);
  torch::load(optimizer, stream);
}

TEST(FusedLARSArchive, RoundTripContinuesBitForBit) {
  for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kDouble}) {
    const auto params = make_params(dtype);
    FusedLARS optimizer(params, Options(2.0)
                                    .weight_decay(0.01)
                                    .trust_coefficient(0.02)
                                    .nesterov(true)
                                    .master_weights(true)
                                    .max_grad_norm(0.5));
    run_steps(optimizer, params, 0, 5);
    const auto copies = copy_of(params);
    FusedLARS restored(copies);
    load(restored, saved(optimizer));
    EXPECT_EQ(options_of(restored).trust_coefficient(), 0.02);
    EXPECT_TRUE(options_of(restored).nesterov());
    run_steps(optimizer, params, 5, 8);
    run_steps(restored, copies, 5, 8);
    expect_equal(copies, params);
    EXPECT_EQ(state_of(restored, copies[0]).step().item<float>(), 8.0f);
  }
}

TEST(FusedLARSArchive, WithoutABufferIsRefused) {
  const auto params = make_params();
  FusedLARS optimizer(params);
  run_steps(optimizer, params, 0, 2);
  state_of(optimizer, params[1]).momentum_buffer(torch::Tensor());
  const std::string bytes = saved(optimizer);
  FusedLARS other(copy_of(params));
  expect_error([&] { load(other, bytes); },
               "expected the archive to hold param_groups[0].state[1].momentum_buffer");
  EXPECT_TRUE(other.state().empty());
}

TEST(FusedLARSOptions, OutOfRangeValuesAreRefusedByName) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto construct = [](const Options& options) {
    return [options] { FusedLARS optimizer(make_params(), options); };
  };
  expect_error(construct(Options(-1.0)), "FusedLARS: expected defaults.lr to be a finite number");
  expect_error(construct(Options().momentum(nan)), "defaults.momentum to be a finite number >= 0");
  expect_error(construct(Options().weight_decay(-0.5)), "defaults.weight_decay to be");
  expect_error(construct(Options().trust_coefficient(-0.1)), "defaults.trust_coefficient to be");
  expect_error(construct(Options().eps(-1.0)), "defaults.eps to be a finite number >= 0");
  expect_error(construct(Options().momentum(0.0).nesterov(true)),
               "defaults.nesterov to come with a momentum above 0, got 0");
  expect_error(construct(Options().max_grad_norm(-2.0)), "defaults.max_grad_norm to be >= 0");
  Options options(0.5);
  expect_error([&] { options.set_lr(-3.0); }, "options.lr to be a finite number >= 0, got -3");
  EXPECT_EQ(options.get_lr(), 0.5);
}

}  // namespace
}  // namespace torchfuse::optim
