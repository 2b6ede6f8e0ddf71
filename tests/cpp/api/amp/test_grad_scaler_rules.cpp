// SPDX-License-Identifier: BSD-3-Clause
// When each call is allowed, with torch's sentences; what the scaler does beyond torch's, all of it
// off by default; archives, whole and damaged.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/amp/grad_scaler.h>
#include <torchfuse/optim/fused_adam.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "amp_testing.h"

namespace torchfuse::testing {
namespace {

using amp::GradScaler;
using amp::GradScalerOptions;
using amp::GradScalerState;
using optim::FusedAdam;
using optim::FusedAdamOptions;

static_assert(!std::is_copy_constructible_v<GradScaler>);
static_assert(std::is_nothrow_move_constructible_v<GradScaler>);

TEST(GradScalerRules, HasTorchsDefaults) {
  const GradScaler scaler(torch::kCPU);
  EXPECT_TRUE(scaler.is_enabled());
  EXPECT_EQ(scaler.get_scale(), 65536.0);
  EXPECT_EQ(scaler.get_growth_factor(), 2.0);
  EXPECT_EQ(scaler.get_backoff_factor(), 0.5);
  EXPECT_EQ(scaler.get_growth_interval(), 2000);
  EXPECT_EQ(scaler.get_growth_tracker(), 0);
}

TEST(GradScalerRules, RefusesCallsOutOfOrder) {
  const auto params = make_params();
  set_grads(params, 1);
  FusedAdam optimizer(params);
  GradScaler scaler = make_scaler();
  const std::string unscaled = " but _scale is None.  This may indicate your script did not use";
  expect_error([&] { scaler.unscale_(optimizer); }, "Attempted unscale_" + unscaled);
  expect_error([&] { scaler.step(optimizer); }, "Attempted step" + unscaled);
  expect_error([&] { scaler.update(); }, "Attempted update" + unscaled);
  scaler.scale(torch::zeros({}));
  expect_error([&] { scaler.update(); },
               "No inf checks were recorded prior to update. Call scaler.step(), with gradients.");
  scaler.unscale_(optimizer);
  expect_error([&] { scaler.unscale_(optimizer); },
               "unscale_() has already been called on this optimizer since the last update().");
  scaler.step(optimizer);
  expect_error([&] { scaler.unscale_(optimizer); }, "unscale_() is being called after step().");
  expect_error([&] { scaler.step(optimizer); },
               "step() has already been called since the last update().");
  scaler.update();
  scaler.step(optimizer);
  scaler.update();
  EXPECT_EQ(scaler.get_growth_tracker(), 2);
}

TEST(GradScalerRules, RefusesClosures) {
  const auto params = make_params();
  set_grads(params, 1);
  GradScaler scaler = started_scaler();
  torch::optim::SGD other(params, torch::optim::SGDOptions(0.1));
  FusedAdam ours(params);
  for (torch::optim::Optimizer* optimizer : {static_cast<torch::optim::Optimizer*>(&ours),
                                             static_cast<torch::optim::Optimizer*>(&other)}) {
    expect_error([&] { scaler.step(*optimizer, [] { return torch::zeros({}); }); },
                 "Closure use is not currently supported if GradScaler is enabled.");
    scaler.step(*optimizer);
  }
  scaler.update();
  // The scaler's request ends with the step.
  EXPECT_EQ(ours.step([] { return torch::ones({}); }).item<float>(), 1.0F);
}

TEST(GradScalerRules, RefusesStepsWithoutGradients) {
  const auto params = make_params();
  torch::optim::SGD other(params, torch::optim::SGDOptions(0.1));
  FusedAdam ours(params);
  GradScaler scaler = started_scaler();
  expect_error([&] { scaler.step(other); }, "No inf checks were recorded for this optimizer.");
  scaler.step(ours);
  expect_error([&] { scaler.update(); }, "No inf checks were recorded prior to update.");
}

TEST(GradScalerRules, RefusesToUnscaleHalfGradients) {
  const auto params = make_params(torch::kHalf);
  set_grads(params, 1);
  FusedAdam optimizer(params);
  GradScaler scaler = started_scaler();
  expect_error([&] { scaler.unscale_(optimizer); }, "Attempting to unscale FP16 gradients.");
  scaler.step(optimizer);
  scaler.update();
  EXPECT_EQ(optimizer.last_step_skipped().item<float>(), 0.0F);
}

TEST(GradScalerRules, UnscalesSparseGradients) {
  const torch::Tensor table = torch::zeros({5, 2}, torch::requires_grad());
  const torch::Tensor indices = torch::tensor({{3, 1, 3}});
  table.mutable_grad() = torch::sparse_coo_tensor(indices, torch::ones({3, 2}), {5, 2});
  torch::optim::SGD optimizer({table}, torch::optim::SGDOptions(0.1));
  GradScaler scaler = started_scaler(4.0);
  scaler.unscale_(optimizer);
  EXPECT_EQ(table.grad().to_dense()[3][0].item<float>(), 0.5F);
}

TEST(GradScalerRules, GoesOnAfterAStepThatFailed) {
  const torch::Tensor table = torch::zeros({4, 2}, torch::requires_grad());
  table.mutable_grad() = torch::ones({4, 2}).to_sparse();
  FusedAdam stranger({table});
  const auto params = make_params();
  FusedAdam optimizer(params);
  GradScaler scaler = started_scaler();
  expect_error([&] { scaler.step(stranger); }, "expected grad of params[0] of group 0 to be dense");
  expect_error([&] { scaler.update(); }, "No inf checks were recorded prior to update.");
  set_grads(params, 1);
  params[0].mutable_grad().view(-1)[0] = kInf;
  scaler.step(optimizer);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 8.0);
}

TEST(GradScalerRules, TakesANewScale) {
  GradScaler scaler = started_scaler();
  scaler.update(3.0);
  EXPECT_EQ(scaler.get_scale(), 3.0);
  const torch::Tensor new_scale = torch::full({1}, 5.0);
  scaler.update(new_scale);
  new_scale.fill_(7.0);
  EXPECT_EQ(scaler.get_scale(), 5.0);
  for (const torch::Tensor& bad :
       {torch::ones({2}), torch::ones({}, torch::requires_grad()), torch::Tensor()}) {
    expect_error([&] { scaler.update(bad); }, "new_scale should be a float or a 1-element");
  }
  EXPECT_EQ(scaler.get_scale(), 5.0);
}

TEST(GradScalerRules, SettersCheckTheirValues) {
  GradScaler scaler = make_scaler();
  scaler.set_growth_factor(3.0);
  scaler.set_backoff_factor(0.25);
  scaler.set_growth_interval(7);
  expect_error([&] { scaler.set_growth_factor(1.0); }, "The growth factor must be > 1.0.");
  expect_error([&] { scaler.set_growth_factor(NAN); }, "The growth factor must be > 1.0.");
  expect_error([&] { scaler.set_backoff_factor(1.0); }, "The backoff factor must be < 1.0.");
  expect_error([&] { scaler.set_growth_interval(0); },
               "GradScaler: expected growth_interval to be at least 1, got 0.");
  EXPECT_EQ(scaler.get_growth_factor(), 3.0);
  EXPECT_EQ(scaler.get_backoff_factor(), 0.25);
  EXPECT_EQ(scaler.get_growth_interval(), 7);
  expect_error([] { GradScaler(torch::kCPU, GradScalerOptions().growth_factor(0.5)); },
               "The growth factor must be > 1.0.");
}

TEST(GradScalerRules, DisabledPassesThrough) {
  const auto params = make_params();
  const auto reference = copy_of(params);
  set_grads(params, 1);
  set_grads(reference, 1);
  GradScaler scaler(torch::kCPU, GradScalerOptions().enabled(false).growth_factor(0.0));
  FusedAdam optimizer(params);
  const torch::Tensor outputs = torch::ones({2});
  EXPECT_TRUE(scaler.scale(outputs).is_same(outputs));
  scaler.unscale_(optimizer);
  EXPECT_EQ(scaler.step(optimizer, [] { return torch::ones({}); }).item<float>(), 1.0F);
  scaler.update();
  FusedAdam(reference).step();
  expect_equal(params, reference);
  EXPECT_EQ(scaler.get_scale(), 1.0);
  EXPECT_FALSE(scaler.state_dict().has_value());
  scaler.load_state_dict({});
}

TEST(GradScalerRules, IsDisabledWhereCudaIsMissing) {
  if (torch::cuda::is_available()) GTEST_SKIP() << "needs a machine without CUDA";
  EXPECT_FALSE(GradScaler(torch::kCUDA).is_enabled());
}

TEST(GradScalerExtras, AStaticScaleStaysAndStillSkips) {
  for (const MakeOptimizer& make : {kFusedAdam, kSgd}) {
    for (const bool unscale : {false, true}) {
      const auto optimizer = make(make_params());
      GradScaler scaler(torch::kCPU,
                        GradScalerOptions().init_scale(8.0).growth_interval(1).dynamic(false));
      for (const bool overflow : {false, true, false, true}) {
        EXPECT_EQ(iterate(scaler, *optimizer, overflow, unscale), overflow);
      }
      EXPECT_EQ(scaler.get_scale(), 8.0);
    }
  }
}

TEST(GradScalerExtras, SkipsAreCounted) {
  for (const MakeOptimizer& make : {kFusedAdam, kSgd}) {
    const auto optimizer = make(make_params());
    GradScaler scaler = make_scaler();
    EXPECT_FALSE(scaler.step_counts().defined());
    EXPECT_FALSE(scaler.last_step_skipped());
    for (const bool overflow : {false, true, true, false}) {
      iterate(scaler, *optimizer, overflow);
      EXPECT_EQ(scaler.last_step_skipped(), overflow);
    }
    EXPECT_EQ(scaler.skipped_steps(), 2);
    EXPECT_TRUE(torch::equal(scaler.step_counts(), torch::tensor({4, 2, 0}, torch::kLong)));
  }
}

TEST(GradScalerExtras, HistoryIsARingOfTheLastIterations) {
  FusedAdam optimizer(make_params());
  GradScaler scaler(torch::kCPU,
                    GradScalerOptions().init_scale(8.0).growth_interval(2).history_size(3));
  EXPECT_TRUE(scaler.scale_history().empty());
  for (const bool overflow : {false, true, false, false}) iterate(scaler, optimizer, overflow);
  const auto history = scaler.scale_history();
  ASSERT_EQ(history.size(), 3U);
  const std::vector<double> scales = {8, 4, 4};
  for (std::size_t i = 0; i < history.size(); ++i) {
    EXPECT_EQ(history[i].step, static_cast<std::int64_t>(i) + 1);
    EXPECT_EQ(history[i].scale, scales[i]);
    EXPECT_EQ(history[i].skipped, i == 0);
  }
}

TEST(GradScalerExtras, ANewScaleCountsTheIterationToo) {
  FusedAdam optimizer(make_params());
  GradScaler scaler(torch::kCPU, GradScalerOptions().init_scale(8.0).history_size(4));
  scaler.scale(torch::zeros({}));
  const auto& params = optimizer.param_groups()[0].params();
  set_grads(params, 1);
  params[0].mutable_grad().view(-1)[0] = kInf;
  scaler.step(optimizer);
  scaler.update(4.0);
  EXPECT_EQ(scaler.get_scale(), 4.0);
  EXPECT_EQ(scaler.skipped_steps(), 1);
  EXPECT_EQ(scaler.scale_history().at(0).scale, 8.0);
  scaler.update(2.0);
  EXPECT_EQ(scaler.scale_history().size(), 1U) << "nothing was checked since";
}

TEST(GradScalerExtras, Fp16GradientsOnRequest) {
  const auto param =
      torch::ones({3}, torch::TensorOptions().dtype(torch::kHalf)).set_requires_grad(true);
  torch::optim::SGD optimizer({param}, torch::optim::SGDOptions(0.1));
  GradScaler scaler(torch::kCPU, GradScalerOptions().init_scale(4.0).allow_fp16_grads(true));
  scaler.scale(torch::zeros({}));
  param.mutable_grad() = torch::full({3}, 4.0, torch::kHalf);
  scaler.unscale_(optimizer);
  EXPECT_TRUE(torch::equal(param.grad(), torch::ones({3}, torch::kHalf)));
}

TEST(GradScalerExtras, NoGradientsAtAllOnRequest) {
  for (const MakeOptimizer& make : {kFusedAdam, kSgd}) {
    for (const bool unscale : {false, true}) {
      const auto optimizer = make(make_params());
      GradScaler scaler(
          torch::kCPU, GradScalerOptions().init_scale(8.0).growth_interval(1).allow_no_grads(true));
      scaler.scale(torch::zeros({}));
      if (unscale) scaler.unscale_(*optimizer);
      scaler.step(*optimizer);
      expect_error([&] { scaler.step(*optimizer); },
                   "step() has already been called since the last update().");
      scaler.update();
      EXPECT_EQ(scaler.get_scale(), 8.0);
      EXPECT_FALSE(iterate(scaler, *optimizer, false));
      EXPECT_EQ(scaler.get_scale(), 16.0);
    }
  }
}

TEST(GradScalerExtras, RefusesNumbersOutOfRange) {
  const auto refuses = [](const GradScalerOptions& options, const std::string& message) {
    expect_error([&] { GradScaler(torch::kCPU, options); }, "GradScaler: expected " + message);
  };
  refuses(GradScalerOptions().init_scale(NAN), "init_scale to be positive and finite, got nan");
  refuses(GradScalerOptions().init_scale(0.0), "init_scale to be positive and finite, got 0");
  refuses(GradScalerOptions().init_scale(0x1p127),
          "init_scale to be from 2^-126 to 2^126, so that");
  refuses(GradScalerOptions().init_scale(1e300), "init_scale to be from 2^-126 to 2^126, so that");
  refuses(GradScalerOptions().init_scale(1e-50), "init_scale to be from 2^-126 to 2^126, so that");
  refuses(GradScalerOptions().min_scale(0x1p127), "min_scale to be at most 2^126, got 1.70");
  refuses(GradScalerOptions().min_scale(2.0).max_scale(1.0),
          "0 <= min_scale <= max_scale within fp32, got min_scale 2 and max_scale 1");
  refuses(GradScalerOptions().min_scale(NAN), "0 <= min_scale <= max_scale within fp32");
  refuses(GradScalerOptions().hysteresis(0),
          "hysteresis to be a 32-bit count of at least 1, got 0.");
  refuses(GradScalerOptions().max_scale(1e39), "0 <= min_scale <= max_scale within fp32");
  refuses(GradScalerOptions().history_size(-1), "history_size to be at least 0, got -1.");
  GradScaler scaler = started_scaler();
  expect_error([&] { scaler.update(NAN); },
               "GradScaler: expected new_scale to be positive and finite, got nan.");
  expect_error([&] { scaler.update(-1.0); }, "new_scale to be positive and finite, got -1.");
  expect_error([&] { scaler.update(0x1p127); }, "new_scale to be from 2^-126 to 2^126, so that");
  EXPECT_EQ(scaler.get_scale(), 16.0);
}

TEST(GradScalerExtras, BringsATooLargeScaleOfTorchDown) {
  GradScaler scaler = started_scaler();
  amp::GradScalerState state = *scaler.state_dict();
  state.scale = 0x1p127;
  testing::Warnings warnings;
  {
    const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    scaler.load_state_dict(state);
  }
  ASSERT_EQ(warnings.texts.size(), 1u);
  EXPECT_NE(warnings.texts[0].find("the state's scale is 1.70141e+38, and becomes 2^126"),
            std::string::npos)
      << warnings.texts[0];
  EXPECT_EQ(scaler.get_scale(), 0x1p126);
  state.scale = 1e300;
  expect_error([&] { scaler.load_state_dict(state); }, "the state's scale to be from 2^-126 to");
  EXPECT_EQ(scaler.get_scale(), 0x1p126);
}

TEST(GradScalerExtras, AnUnknownProcessGroupIsNamed) {
  FusedAdam optimizer(make_params());
  GradScaler scaler(torch::kCPU, GradScalerOptions().process_group("no such group"));
  scaler.scale(torch::zeros({}));
  set_grads(optimizer.param_groups()[0].params(), 1);
  expect_error([&] { scaler.step(optimizer); }, "no such group");
}

GradScalerState some_state() { return {128.0, 3.0, 0.25, 7, 5, 1}; }

/// A scaler in that state, with its tensors in place.
GradScaler used_scaler() {
  GradScaler scaler(torch::kCPU, GradScalerOptions().hysteresis(2));
  scaler.scale(torch::zeros({}));
  scaler.load_state_dict(some_state());
  return scaler;
}

void expect_state(const GradScaler& scaler, const GradScalerState& expected) {
  const auto state = scaler.state_dict();
  ASSERT_TRUE(state.has_value());
  EXPECT_EQ(state->scale, expected.scale);
  EXPECT_EQ(state->growth_factor, expected.growth_factor);
  EXPECT_EQ(state->backoff_factor, expected.backoff_factor);
  EXPECT_EQ(state->growth_interval, expected.growth_interval);
  EXPECT_EQ(state->growth_tracker, expected.growth_tracker);
  EXPECT_EQ(state->hysteresis_tracker, expected.hysteresis_tracker);
}

/// Loads an archive that holds everything but `missing`, and `replacement` under that name if it is
/// given.
void load_damaged(GradScaler& scaler, const std::string& missing, const c10::IValue& replacement) {
  torch::serialize::OutputArchive output;
  const GradScalerState state = some_state();
  const std::pair<const char*, c10::IValue> fields[] = {
      {"enabled", true},
      {"scale", 1.0},
      {"growth_factor", state.growth_factor},
      {"backoff_factor", state.backoff_factor},
      {"growth_interval", state.growth_interval},
      {"_growth_tracker", state.growth_tracker},
      {"_hysteresis_tracker", *state.hysteresis_tracker},
  };
  for (const auto& [name, value] : fields) {
    if (name != missing) {
      output.write(name, value);
    } else if (!replacement.isNone()) {
      output.write(name, replacement);
    }
  }
  torch::serialize::InputArchive input = reopened(output);
  scaler.load(input);
}

TEST(GradScalerState, SurvivesSaveAndLoad) {
  const std::string bytes = saved(used_scaler());
  for (const bool started : {false, true}) {
    GradScaler loaded(torch::kCPU, GradScalerOptions().hysteresis(2));
    if (started) loaded.scale(torch::zeros({}));
    load(loaded, bytes);
    expect_state(loaded, some_state());
    EXPECT_EQ(loaded.scale(torch::ones({})).item<float>(), 128.0F);
    const GradScaler target = std::move(loaded);
    expect_state(target, some_state());
  }
}

TEST(GradScalerState, DamagedFieldsAreNamedAndChangeNothing) {
  GradScaler scaler = used_scaler();
  for (const char* name : {"enabled", "scale", "growth_factor", "backoff_factor", "growth_interval",
                           "_growth_tracker", "_hysteresis_tracker"}) {
    expect_error([&] { load_damaged(scaler, name, {}); },
                 std::string("GradScaler.load: expected the archive to hold '") + name + "'");
    expect_state(scaler, some_state());
  }
  expect_error([&] { load_damaged(scaler, "backoff_factor", torch::ones({})); },
               "GradScaler.load: expected 'backoff_factor' to be a number, got Tensor.");
  expect_error([&] { load_damaged(scaler, "growth_interval", 2.5); },
               "GradScaler.load: expected 'growth_interval' to be an integer, got Double.");
  const std::pair<const char*, c10::IValue> wrong_values[] = {
      {"scale", NAN},
      {"scale", -1.0},
      {"growth_factor", 1.0},
      {"backoff_factor", NAN},
      {"growth_interval", std::int64_t{0}},
      {"_growth_tracker", std::int64_t{-1}},
      {"_growth_tracker", std::int64_t{1} << 40},
  };
  for (const auto& [name, value] : wrong_values) {
    EXPECT_THROW(load_damaged(scaler, name, value), c10::Error) << name;
    expect_state(scaler, some_state());
  }
}

TEST(GradScalerState, TruncatedArchiveIsRefused) {
  const std::string bytes = saved(used_scaler());
  GradScaler scaler = used_scaler();
  for (const std::size_t size : {std::size_t{0}, bytes.size() / 2, bytes.size() - 1}) {
    EXPECT_THROW(load(scaler, bytes.substr(0, size)), c10::Error) << size << " bytes";
    expect_state(scaler, some_state());
  }
  scaler.update(2.0);
  EXPECT_EQ(scaler.get_scale(), 2.0);
}

TEST(GradScalerState, ArchiveOfADisabledScaler) {
  const std::string bytes = saved(GradScaler(torch::kCPU, GradScalerOptions().enabled(false)));
  GradScaler scaler = used_scaler();
  expect_error([&] { load(scaler, bytes); },
               "The source state dict is empty, possibly because it was saved from a disabled");
  expect_state(scaler, some_state());
  GradScaler disabled(torch::kCPU, GradScalerOptions().enabled(false));
  load(disabled, bytes);
  EXPECT_FALSE(disabled.is_enabled());
}

}  // namespace
}  // namespace torchfuse::testing
