// SPDX-License-Identifier: BSD-3-Clause
// Archives of the scaler, whole and damaged.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/amp/grad_scaler.h>

#include <cmath>
#include <cstdint>
#include <sstream>
#include <string>
#include <utility>

#include "../optim/optim_testing.h"

namespace torchfuse::testing {
namespace {

using amp::GradScaler;
using amp::GradScalerOptions;
using amp::GradScalerState;

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
  std::stringstream stream;
  output.save_to(stream);
  torch::load(scaler, stream);
}

TEST(GradScalerState, SurvivesSaveAndLoad) {
  const GradScaler saved = used_scaler();
  std::stringstream stream;
  torch::save(saved, stream);
  const std::string bytes = stream.str();
  for (const bool started : {false, true}) {
    GradScaler loaded(torch::kCPU, GradScalerOptions().hysteresis(2));
    if (started) loaded.scale(torch::zeros({}));
    std::istringstream copy(bytes);
    torch::load(loaded, copy);
    expect_state(loaded, some_state());
    EXPECT_EQ(loaded.scale(torch::ones({})).item<float>(), 128.0F);
    expect_state(loaded, some_state());
  }
}

TEST(GradScalerState, MovesWithTheScaler) {
  GradScaler source = used_scaler();
  const GradScaler target = std::move(source);
  expect_state(target, some_state());
}

TEST(GradScalerState, MissingFieldIsNamedAndChangesNothing) {
  GradScaler scaler = used_scaler();
  for (const char* name : {"enabled", "scale", "growth_factor", "backoff_factor", "growth_interval",
                           "_growth_tracker", "_hysteresis_tracker"}) {
    expect_error([&] { load_damaged(scaler, name, {}); },
                 std::string("GradScaler.load: expected the archive to hold '") + name + "'");
    expect_state(scaler, some_state());
  }
}

TEST(GradScalerState, WrongTypeIsNamedAndChangesNothing) {
  GradScaler scaler = used_scaler();
  expect_error([&] { load_damaged(scaler, "backoff_factor", torch::ones({})); },
               "GradScaler.load: expected 'backoff_factor' to be a number, got Tensor.");
  expect_error([&] { load_damaged(scaler, "growth_interval", 2.5); },
               "GradScaler.load: expected 'growth_interval' to be an integer, got Double.");
  expect_state(scaler, some_state());
}

TEST(GradScalerState, WrongValueIsNamedAndChangesNothing) {
  GradScaler scaler = used_scaler();
  const std::pair<const char*, c10::IValue> cases[] = {
      {"scale", NAN},
      {"scale", -1.0},
      {"growth_factor", 1.0},
      {"backoff_factor", NAN},
      {"growth_interval", std::int64_t{0}},
      {"_growth_tracker", std::int64_t{-1}},
      {"_growth_tracker", std::int64_t{1} << 40},
  };
  for (const auto& [name, value] : cases) {
    EXPECT_THROW(load_damaged(scaler, name, value), c10::Error) << name;
    expect_state(scaler, some_state());
  }
}

TEST(GradScalerState, TruncatedArchiveIsRefused) {
  std::stringstream stream;
  torch::save(used_scaler(), stream);
  const std::string bytes = stream.str();
  GradScaler scaler = used_scaler();
  for (const std::size_t size : {std::size_t{0}, bytes.size() / 2, bytes.size() - 1}) {
    std::istringstream truncated(bytes.substr(0, size));
    EXPECT_THROW(torch::load(scaler, truncated), c10::Error) << size << " bytes";
    expect_state(scaler, some_state());
  }
  scaler.update(2.0);
  EXPECT_EQ(scaler.get_scale(), 2.0);
}

TEST(GradScalerState, ArchiveOfADisabledScaler) {
  std::stringstream stream;
  torch::save(GradScaler(torch::kCPU, GradScalerOptions().enabled(false)), stream);
  const std::string bytes = stream.str();
  GradScaler scaler = used_scaler();
  std::istringstream copy(bytes);
  expect_error([&] { torch::load(scaler, copy); },
               "The source state dict is empty, possibly because it was saved from a disabled");
  expect_state(scaler, some_state());
  GradScaler disabled(torch::kCPU, GradScalerOptions().enabled(false));
  std::istringstream again(bytes);
  torch::load(disabled, again);
  EXPECT_FALSE(disabled.is_enabled());
}

}  // namespace
}  // namespace torchfuse::testing
