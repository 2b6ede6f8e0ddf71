// SPDX-License-Identifier: BSD-3-Clause
// Saves and loads a GradScaler in torch's archives.
#include <torchfuse/amp/grad_scaler.h>

#include <c10/util/Exception.h>

#include <optional>

namespace torchfuse::amp {
namespace {

c10::IValue read_field(torch::serialize::InputArchive& archive, const char* name,
                       bool (c10::IValue::*has_type)() const, const char* type) {
  c10::IValue value;
  TORCH_CHECK(archive.try_read(name, value), "GradScaler.load: expected the archive to hold '",
              name, "', got none. Load a complete archive that GradScaler.save wrote.");
  TORCH_CHECK((value.*has_type)(), "GradScaler.load: expected '", name, "' to be ", type, ", got ",
              value.tagKind(), ".");
  return value;
}

double read_double(torch::serialize::InputArchive& archive, const char* name) {
  return read_field(archive, name, &c10::IValue::isDouble, "a number").toDouble();
}

std::int64_t read_int(torch::serialize::InputArchive& archive, const char* name) {
  return read_field(archive, name, &c10::IValue::isInt, "an integer").toInt();
}

}  // namespace

void GradScaler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("enabled", c10::IValue(options_.enabled()));
  const std::optional<GradScalerState> state = state_dict();
  if (!state) return;
  archive.write("scale", c10::IValue(state->scale));
  archive.write("growth_factor", c10::IValue(state->growth_factor));
  archive.write("backoff_factor", c10::IValue(state->backoff_factor));
  archive.write("growth_interval", c10::IValue(state->growth_interval));
  archive.write("_growth_tracker", c10::IValue(state->growth_tracker));
  archive.write("_hysteresis_tracker", c10::IValue(*state->hysteresis_tracker));
}

void GradScaler::load(torch::serialize::InputArchive& archive) {
  if (!options_.enabled()) return;
  const c10::IValue saved_enabled = read_field(archive, "enabled", &c10::IValue::isBool, "a bool");
  TORCH_CHECK(saved_enabled.toBool(),
              "The source state dict is empty, possibly because it was saved from a disabled "
              "instance of GradScaler.");
  GradScalerState state;
  state.scale = read_double(archive, "scale");
  state.growth_factor = read_double(archive, "growth_factor");
  state.backoff_factor = read_double(archive, "backoff_factor");
  state.growth_interval = read_int(archive, "growth_interval");
  state.growth_tracker = read_int(archive, "_growth_tracker");
  state.hysteresis_tracker = read_int(archive, "_hysteresis_tracker");
  load_state_dict(state);
}

}  // namespace torchfuse::amp
