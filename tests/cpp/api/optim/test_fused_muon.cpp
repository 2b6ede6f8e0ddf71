// SPDX-License-Identifier: BSD-3-Clause
// What FusedMuon alone has: orthogonalized matrices, stacks and layouts of them, AdamW for other
// parameters, and the division of a model's parameters.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/torchfuse.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "all_classes.h"
#include "optim_testing.h"

namespace torchfuse::muon_testing {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace): all helpers
using optim::FusedMuon;
using optim::FusedMuonOptions;
using Options = FusedMuonOptions;
using Tensors = std::vector<torch::Tensor>;

Options exact_options() { return Options(0.02).ns_dtype(torch::kFloat); }

Tensors matrices(torch::ScalarType dtype) {
  torch::manual_seed(11);
  Tensors params;
  for (const auto& sizes : std::vector<std::vector<std::int64_t>>{
           {37, 5}, {5, 37}, {6, 6}, {9, 1}, {6, 3, 2, 2}, {6, 6}}) {
    params.push_back(torch::randn(sizes, torch::kFloat).to(dtype).requires_grad_(true));
  }
  return params;
}

void expect_near(const torch::Tensor& actual, const torch::Tensor& expected, double tolerance) {
  ASSERT_EQ(actual.sizes(), expected.sizes());
  const torch::Tensor reference = expected.detach().to(torch::kDouble);
  const torch::Tensor difference = actual.detach().to(torch::kDouble) - reference;
  EXPECT_LE(difference.norm().item<double>(), tolerance * reference.norm().item<double>());
}

/// Steps of a matrix in fp64, with the iterations written for its rows.
struct Formula {
  explicit Formula(const torch::Tensor& begin)
      : param(begin.detach().to(torch::kDouble, /*non_blocking=*/false, /*copy=*/true)),
        momentum(torch::zeros_like(param)) {}

  static torch::Tensor orthogonalized(torch::Tensor x, const Options& options) {
    const auto [a, b, c] = options.ns_coefficients();
    x = x / std::max(x.norm().item<double>(), options.eps());
    for (std::int64_t i = 0; i < options.ns_steps(); ++i) {
      const torch::Tensor gram = x.matmul(x.t());
      x = a * x + (b * gram + c * gram.matmul(gram)).matmul(x);
    }
    return x;
  }

  void step(const torch::Tensor& grad, const Options& options) {
    const torch::Tensor g = grad.to(torch::kDouble);
    const double mu = options.momentum();
    momentum = mu * momentum + (1 - mu) * g;
    const torch::Tensor d = options.nesterov() ? mu * momentum + (1 - mu) * g : momentum;
    const torch::Tensor x = orthogonalized(d.flatten(1), options);
    const auto rows = static_cast<double>(x.size(0));
    const auto columns = static_cast<double>(x.size(1));
    double factor = std::sqrt(std::max(1.0, rows / columns));
    if (options.adjust_lr_fn() == "match_rms_adamw")
      factor = 0.2 * std::sqrt(std::max(rows, columns));
    if (options.adjust_lr_fn() == "spectral_unclamped") factor = std::sqrt(rows / columns);
    const double lr = options.lr();
    param = param * (1 - lr * options.weight_decay()) - lr * factor * x.view_as(param);
  }

  torch::Tensor param;
  torch::Tensor momentum;
};

TEST(FusedMuon, MatricesFollowTheFormulaInFp64) {
  const std::vector<Options> all{exact_options(),
                                 exact_options().adjust_lr_fn("original").nesterov(false),
                                 exact_options().adjust_lr_fn("match_rms_adamw").momentum(0.0),
                                 exact_options()
                                     .adjust_lr_fn("spectral_unclamped")
                                     .weight_decay(0.0)
                                     .ns_coefficients({2.0, -1.5, 0.5})
                                     .ns_steps(7)
                                     .eps(0.5)};
  for (std::size_t index = 0; index < all.size(); ++index) {
    for (const auto dtype : {torch::kFloat, torch::kDouble}) {
      SCOPED_TRACE(c10::str("options ", index, ", ", dtype));
      const Tensors params = matrices(dtype);
      std::vector<Formula> formulas(params.begin(), params.end());
      FusedMuon optimizer(params, all[index]);
      for (int step = 0; step < 50; ++step) {
        run_steps(optimizer, params, step, step + 1);
        for (std::size_t i = 0; i < params.size(); ++i) {
          formulas[i].step(params[i].grad(), all[index]);
        }
      }
      const double tolerance = dtype == torch::kFloat ? 1e-5 : 1e-9;
      for (std::size_t i = 0; i < params.size(); ++i) {
        SCOPED_TRACE(c10::str("sizes ", params[i].sizes()));
        expect_near(params[i], formulas[i].param, tolerance);
        expect_near(state_of(optimizer, params[i]).momentum_buffer(), formulas[i].momentum,
                    tolerance);
      }
    }
  }
}

TEST(FusedMuon, IterationsInBf16ComeNearThoseInFp32) {
  const Tensors params = matrices(torch::kFloat);
  const Tensors copies = copy_of(params);
  FusedMuon exact(params, exact_options());
  FusedMuon narrow(copies, exact_options().ns_dtype(torch::kBFloat16));
  run_steps(exact, params, 0, 5);
  run_steps(narrow, copies, 0, 5);
  for (std::size_t i = 0; i < params.size(); ++i) {
    expect_near(copies[i], params[i], 1e-2);
    EXPECT_FALSE(torch::allclose(copies[i], params[i], 1e-5, 1e-5));
  }
}

TEST(FusedMuon, PolarExpressBringsAllSingularValuesToOne) {
  for (const auto dtype : {torch::kFloat, torch::kDouble}) {
    const torch::Tensor param = torch::zeros({40, 24}, dtype).requires_grad_(true);
    FusedMuon optimizer(Tensors{param}, exact_options().lr(1.0).polar_express(true).ns_steps(8));
    run_steps(optimizer, {param}, 0, 1);
    const torch::Tensor values = torch::linalg_svdvals(param.detach() / std::sqrt(40.0 / 24.0));
    EXPECT_LE((values - 1.0).abs().max().item<double>(), 1e-4);
  }
}

TEST(FusedMuon, OtherParametersFollowAdamW) {
  const auto others = Options(1e-3).betas({0.8, 0.95}).eps(1e-6).weight_decay(0.05);
  const Tensors params = make_params();
  const Tensors copies = copy_of(params);
  FusedMuon optimizer(FusedMuon::split(params, exact_options(), others), exact_options());
  const Tensors vectors{copies[1], copies[2], copies[3]};
  torch::optim::AdamW reference(
      vectors, torch::optim::AdamWOptions(1e-3).betas({0.8, 0.95}).eps(1e-6).weight_decay(0.05));
  for (int step = 0; step < 50; ++step) {
    run_steps(optimizer, params, step, step + 1);
    for (std::size_t i = 0; i < 5; ++i) copies[i].mutable_grad() = params[i].grad().clone();
    reference.step();
  }
  expect_close({params[1], params[2], params[3]}, vectors);
  EXPECT_FALSE(state_of(optimizer, params[1]).momentum_buffer().defined());
  EXPECT_FALSE(state_of(optimizer, params[0]).exp_avg().defined());
}

// --- The division of parameters ------------------------------------------------------------------

struct Model : torch::nn::Module {
  Model() {
    torch::nn::init::ones_(frozen->weight);
    frozen->weight.set_requires_grad(false);
  }
  torch::nn::Embedding words = register_module("words", torch::nn::Embedding(7, 4));
  torch::nn::EmbeddingBag bag = register_module("bag", torch::nn::EmbeddingBag(5, 4));
  torch::nn::Conv2d conv = register_module("conv", torch::nn::Conv2d(2, 4, 3));
  torch::nn::Linear frozen = register_module("frozen", torch::nn::Linear(4, 4));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(4, 7));
};

void expect_group(const torch::optim::OptimizerParamGroup& group, const Tensors& params,
                  const Options& options) {
  ASSERT_EQ(group.params().size(), params.size());
  for (std::size_t i = 0; i < params.size(); ++i) {
    EXPECT_TRUE(group.params()[i].is_same(params[i])) << "parameter " << i;
  }
  EXPECT_TRUE(static_cast<const Options&>(group.options()) == options);
}

TEST(FusedMuon, MatricesAndVectorsAreClippedApart) {
  const Tensors params = {torch::ones({3, 4}, torch::requires_grad()),
                          torch::ones({7}, torch::requires_grad())};
  for (const torch::Tensor& param : params) param.mutable_grad() = torch::full_like(param, 2.0);
  FusedMuon optimizer(params, exact_options().max_grad_norm(0.5).clip_apart(true));
  optimizer.step();
  const auto state_of = [&](std::size_t index) -> const optim::FusedMuonParamState& {
    return static_cast<const optim::FusedMuonParamState&>(
        *optimizer.state().at(params[index].unsafeGetTensorImpl()));
  };
  EXPECT_NEAR(state_of(0).momentum_buffer().norm().item<double>(), 0.05 * 0.5, 1e-6);
  EXPECT_NEAR(state_of(1).exp_avg().norm().item<double>(), 0.1 * 0.5, 1e-6);
}

TEST(FusedMuon, SplitPutsTheMatricesOfAModelInAGroup) {
  Model model;
  const Tensors others{model.words->weight, model.bag->weight, model.conv->bias, model.frozen->bias,
                       model.head->bias};
  const auto groups = FusedMuon::split(model, exact_options());
  ASSERT_EQ(groups.size(), 2u);
  expect_group(groups[0], {model.conv->weight, model.head->weight}, exact_options());
  expect_group(groups[1], others, exact_options().use_muon(false).eps(1e-8));

  const auto named =
      FusedMuon::split(model, exact_options().use_muon(false), Options(0.5), {"head.weight"});
  ASSERT_EQ(named.size(), 2u);
  expect_group(named[0], {model.conv->weight}, exact_options());
  EXPECT_EQ(named[1].params().size(), 6u);
  EXPECT_TRUE(static_cast<const Options&>(named[1].options()) == Options(0.5).use_muon(false));

  const auto words = FusedMuon::split(*model.words);  // a model that is itself an embedding
  ASSERT_EQ(words.size(), 1u);
  expect_group(words[0], {model.words->weight}, Options().use_muon(false).eps(1e-8));

  expect_error([&] { FusedMuon::split(model, {}, std::nullopt, {"head"}); },
               "FusedMuon::split: expected adamw to name parameters of the model, got head");
}

/// A layer whose weight is another layer's.
struct Tied : torch::nn::Module {
  explicit Tied(const torch::Tensor& weight) { register_parameter("weight", weight); }
};

TEST(FusedMuon, SplitListsTheParameterOfTiedLayersOnce) {
  Model model;
  model.register_module("tied", std::make_shared<Tied>(model.words->weight));
  model.register_module("other", std::make_shared<Tied>(model.head->weight));
  const auto groups = FusedMuon::split(model, {}, std::nullopt, {"other.weight"});
  ASSERT_EQ(groups.size(), 2u);
  EXPECT_EQ(groups[0].params().size(), 1u);
  EXPECT_EQ(groups[1].params().size(), 6u);
}

TEST(FusedMuon, SplitLeavesOutAGroupWithoutParameters) {
  const Tensors params = make_params();
  EXPECT_EQ(FusedMuon::split(Tensors{params[1]}).size(), 1u);
  EXPECT_EQ(FusedMuon::split(Tensors{params[0], params[4]}).size(), 1u);
  EXPECT_TRUE(FusedMuon::split(Tensors{}).empty());
  FusedMuon optimizer(params, exact_options());
  ASSERT_EQ(optimizer.param_groups().size(), 2u);
  expect_group(optimizer.param_groups()[0], {params[0], params[4]}, exact_options());
  expect_group(optimizer.param_groups()[1], {params[1], params[2], params[3]},
               exact_options().use_muon(false).eps(1e-8));
}

// --- Refusals ------------------------------------------------------------------------------------

TEST(FusedMuon, ParametersThatAreNoMatricesAreRefused) {
  const auto refused = [](const torch::Tensor& param, const Options& options,
                          const std::string& text) {
    param.mutable_grad() = torch::ones_like(param);
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(Tensors{torch::ones({2, 2, 2}).requires_grad_(true), param},
                        std::make_unique<Options>(options));
    FusedMuon optimizer(groups, options);
    expect_error([&] { optimizer.step(); },
                 "FusedMuon::step: expected params[1] of group 0 to have " + text);
  };
  const torch::Tensor vector = torch::ones({3}).requires_grad_(true);
  refused(vector, {}, "at least 2 dimensions with use_muon, got the shape [3].");
  refused(torch::ones({3, 0}).requires_grad_(true), {}, "no dimension of size 0 with use_muon");
  refused(torch::ones({3, 3}).requires_grad_(true), Options().matrix_dims(3),
          "at least 3 dimensions with use_muon");

  FusedMuon optimizer(Tensors{torch::ones({2, 2}).requires_grad_(true)});
  optimizer.add_param_group(torch::optim::OptimizerParamGroup(Tensors{vector}));
  vector.mutable_grad() = torch::ones({3});
  expect_error([&] { optimizer.step(); }, "to have at least 2 dimensions with use_muon");
  static_cast<Options&>(optimizer.param_groups()[1].options()).use_muon(false);
  optimizer.step();
  EXPECT_TRUE(state_of(optimizer, vector).exp_avg().defined());
}

TEST(FusedMuon, OptionsOutOfTheirRangeAreRefusedByName) {
  const auto refused = [](const Options& options, const std::string& text) {
    expect_error([&] { FusedMuon(make_params(), options); },
                 "FusedMuon: expected defaults." + text);
    FusedMuon optimizer(make_params());
    options_of(optimizer) = options;
    expect_error([&] { optimizer.step(); }, "FusedMuon: expected param_groups[0]." + text);
  };
  refused(Options().matrix_dims(1), "matrix_dims to be 0 or at least 2, got 1.");
  refused(Options().matrix_dims(-2), "matrix_dims to be at least 0 and less than 65, got -2");
  refused(Options().adjust_lr_fn("fast"),
          "adjust_lr_fn to be none, original, match_rms_adamw or spectral_unclamped, got fast.");
  refused(Options().ns_steps(0), "ns_steps to be at least 1 and less than 100, got 0");
  refused(Options().ns_steps(100), "ns_steps to be at least 1 and less than 100, got 100");
  refused(Options().ns_dtype(torch::kHalf), "ns_dtype to be none, Float or BFloat16, got Half.");
  refused(Options().momentum(1.0), "momentum to be at least 0 and less than 1, got 1");
  refused(Options().ns_coefficients({1.0, std::nan(""), 1.0}), "ns_b to be ");
}

// --- Archives ------------------------------------------------------------------------------------

TEST(FusedMuon, EveryOptionOfItsOwnHasAnotherValueInTheTestsOfArchives) {
  const auto defaults = entries_of(Options());
  for (const auto& [key, entry] : entries_of(other_options<Options>())) {
    const bool storage = std::set<std::string>{"state_dtype", "store_param_remainders",
                                               "stochastic_rounding", "seed", "skip_norm_above"}
                             .count(key) == 1;
    EXPECT_EQ(storage, entry == defaults.at(key)) << key;
  }
}

TEST(FusedMuon, AStateDictContinuesWithTheSameBits) {
  const Tensors params = make_params();
  FusedMuon optimizer(params, other_options<Options>());
  run_steps(optimizer, params, 0, 5);
  const Tensors by_dict = copy_of(params);
  const Tensors by_archive = copy_of(params);
  FusedMuon restored(by_dict);
  restored.load_state_dict(optimizer.state_dict());
  FusedMuon loaded(by_archive);
  load(loaded, saved(optimizer));
  run_steps(optimizer, params, 5, 10);
  run_steps(restored, by_dict, 5, 10);
  run_steps(loaded, by_archive, 5, 10);
  expect_equal(by_dict, params);
  expect_equal(by_archive, params);
  for (std::size_t i = 0; i < params.size(); ++i) {
    expect_same_state(state_of(restored, by_dict[i]), state_of(optimizer, params[i]));
    expect_same_state(state_of(loaded, by_archive[i]), state_of(optimizer, params[i]));
  }
  EXPECT_EQ(own_states(state_of(restored, by_dict[0])).count("momentum_buffer"), 1u);
  EXPECT_EQ(own_states(state_of(restored, by_dict[0])).size(), 1u);
  EXPECT_EQ(own_states(state_of(restored, by_dict[1])).size(), 2u);
}

// --- Stacks and layouts --------------------------------------------------------------------------

/// `param` after five steps with the gradients of others of its sizes.
torch::Tensor stepped(const torch::Tensor& param, const Options& options = exact_options()) {
  const torch::Tensor own = param.detach().requires_grad_(true);
  FusedMuon optimizer(Tensors{own}, options);
  run_steps(optimizer, {own}, 0, 5);
  EXPECT_EQ(own.strides(), param.strides());
  return own.detach();
}

TEST(FusedMuon, AStackEqualsSeparateMatrices) {
  torch::manual_seed(5);
  const torch::Tensor begin = torch::randn({2, 3, 5, 4});
  const torch::Tensor stack = begin.clone().requires_grad_(true);
  Tensors single;
  for (const torch::Tensor& matrix : begin.flatten(0, 1).unbind()) {
    single.push_back(matrix.clone().requires_grad_(true));
  }
  FusedMuon together(Tensors{stack}, exact_options().matrix_dims(2));
  FusedMuon apart(single, exact_options());
  for (int step = 0; step < 5; ++step) {
    run_steps(together, {stack}, step, step + 1);
    const Tensors grads = stack.grad().flatten(0, 1).unbind();
    for (std::size_t i = 0; i < single.size(); ++i) single[i].mutable_grad() = grads[i].clone();
    apart.step();
  }
  EXPECT_TRUE(torch::equal(stack.detach().flatten(0, 1), torch::stack(single).detach()));
  const torch::Tensor whole = stepped(begin);
  EXPECT_FALSE(torch::allclose(stack.detach(), whole, 1e-2, 1e-2));
}

TEST(FusedMuon, EveryLayoutGivesWhatContiguousMatricesGive) {
  torch::manual_seed(6);
  for (const auto& param : {torch::randn({5, 37}).t(), torch::randn({37, 5}).t(),
                            torch::randn({4, 3, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast),
                            torch::randn({3, 4, 6}).permute({2, 0, 1})}) {
    SCOPED_TRACE(c10::str("sizes ", param.sizes(), ", strides ", param.strides()));
    expect_near(stepped(param.clone()), stepped(param.contiguous()), 1e-5);
  }
  const Options stacks = exact_options().matrix_dims(2);
  for (const auto& stack :
       {torch::randn({4, 6, 3}).mT(), torch::randn({4, 6, 3}).permute({2, 0, 1}),
        torch::randn({4, 6, 3}).permute({1, 0, 2})}) {
    SCOPED_TRACE(c10::str("sizes ", stack.sizes(), ", strides ", stack.strides()));
    expect_near(stepped(stack.clone(), stacks), stepped(stack.contiguous(), stacks), 1e-5);
  }
}

}  // namespace
}  // namespace torchfuse::muon_testing
