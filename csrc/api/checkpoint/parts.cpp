// SPDX-License-Identifier: BSD-3-Clause
#include "api/checkpoint/parts.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include "api/checkpoint/model_state.h"

namespace torchfuse::checkpoint {

namespace {

constexpr const char* kExpected = "expected the state";

double number(const Dict& saved, const char* key) {
  c10::IValue value = entry(saved, key, kExpected);
  // Python's scaler stores ints if it was constructed with ints.
  if (value.isInt()) value = static_cast<double>(value.toInt());
  TORCH_CHECK_VALUE(value.isDouble(), kExpected, "['", key, "'] to be a number, got a ",
                    type_name(value), ".");
  return value.toDouble();
}

std::int64_t integer(const Dict& saved, const char* key) {
  const c10::IValue value = entry(saved, key, kExpected);
  TORCH_CHECK_VALUE(value.isInt(), kExpected, "['", key, "'] to be an int, got a ",
                    type_name(value), ".");
  return value.toInt();
}

amp::GradScalerState scaler_state(const Dict& saved) {
  amp::GradScalerState state;
  state.scale = number(saved, "scale");
  state.growth_factor = number(saved, "growth_factor");
  state.backoff_factor = number(saved, "backoff_factor");
  state.growth_interval = integer(saved, "growth_interval");
  state.growth_tracker = integer(saved, "_growth_tracker");
  if (saved.contains("_hysteresis_tracker")) {
    state.hysteresis_tracker = integer(saved, "_hysteresis_tracker");
  }
  return state;
}

void check_position(std::int64_t position, const std::string& where, std::size_t size,
                    const char* remedy) {
  TORCH_CHECK_VALUE(position >= 0 && static_cast<std::size_t>(position) <= size, where,
                    " to be from 0 to ", size, ", the sampler's size, got ", position, ". ",
                    remedy);
}

}  // namespace

CheckpointPart model_part(torch::nn::Module& model) {
  return {
      [&model]() -> c10::IValue {
        Dict state = make_dict();
        for (const auto& [name, tensor] : named_tensors(model)) {
          state.insert_or_assign(name, tensor.detach());
        }
        return state;
      },
      [&model](const c10::IValue& saved) {
        return prepare_model(model, as_dict(saved, kExpected), kExpected);
      },
  };
}

CheckpointPart optimizer_part(optim::FusedOptimizer& optimizer) {
  return {
      [&optimizer]() -> c10::IValue { return optimizer.state_dict(); },
      [&optimizer](const c10::IValue& saved) {
        return optimizer.prepare_state_dict(as_dict(saved, kExpected));
      },
  };
}

CheckpointPart scaler_part(amp::GradScaler& scaler) {
  const auto save = [&scaler]() -> c10::IValue {
    Dict saved = make_dict();
    const auto state = scaler.state_dict();
    if (!state) return saved;
    saved.insert_or_assign("scale", state->scale);
    saved.insert_or_assign("growth_factor", state->growth_factor);
    saved.insert_or_assign("backoff_factor", state->backoff_factor);
    saved.insert_or_assign("growth_interval", state->growth_interval);
    saved.insert_or_assign("_growth_tracker", state->growth_tracker);
    saved.insert_or_assign("_hysteresis_tracker", *state->hysteresis_tracker);
    return saved;
  };
  const auto prepare = [&scaler](const c10::IValue& value) -> std::function<void()> {
    if (!scaler.is_enabled()) return [] {};
    const Dict saved = as_dict(value, kExpected);
    TORCH_CHECK_VALUE(!saved.empty(), kExpected,
                      " of an enabled GradScaler, got a disabled scaler's state.");
    const amp::GradScalerState state = scaler_state(saved);
    // A temporary scaler checks the values, so that `scaler` does not change.
    amp::GradScaler(at::kCPU).load_state_dict(state);
    return [&scaler, state] { scaler.load_state_dict(state); };
  };
  return {save, prepare};
}

CheckpointPart scheduler_part(optim::LRScheduler& scheduler) {
  const auto save = [&scheduler]() -> c10::IValue {
    Dict saved = make_dict();
    for (const auto& [key, value] : scheduler.state_dict()) saved.insert_or_assign(key, value);
    return saved;
  };
  const auto prepare = [&scheduler](const c10::IValue& value) -> std::function<void()> {
    optim::LRSchedulerState state;
    for (const auto& item : as_dict(value, kExpected)) {
      if (item.key().isString()) state[item.key().toStringRef()] = item.value();
    }
    // Only the scheduler can check its state, so load the new state, and then restore the old
    // state.
    const optim::LRSchedulerState own = scheduler.state_dict();
    scheduler.load_state_dict(state);
    scheduler.load_state_dict(own);
    return [&scheduler, state] { scheduler.load_state_dict(state); };
  };
  return {save, prepare};
}

CheckpointPart sampler_part(parallel::DistributedSampler& sampler, std::int64_t& drawn) {
  const auto save = [&sampler, &drawn]() -> c10::IValue {
    check_position(drawn, "expected drawn", sampler.size(),
                   "Count the samples that this process has drawn in the epoch.");
    Dict saved = make_dict();
    saved.insert_or_assign("epoch", sampler.epoch());
    saved.insert_or_assign("position", drawn);
    return saved;
  };
  const auto prepare = [&sampler, &drawn](const c10::IValue& value) -> std::function<void()> {
    const Dict saved = as_dict(value, kExpected);
    const std::int64_t epoch = integer(saved, "epoch");
    const std::int64_t position = integer(saved, "position");
    check_position(position, std::string(kExpected) + "['position']", sampler.size(),
                   "Use the data set and the number of processes of the saved run.");
    return [&sampler, &drawn, epoch, position] {
      sampler.resume(epoch, static_cast<std::size_t>(position));
      drawn = position;
    };
  };
  return {save, prepare};
}

}  // namespace torchfuse::checkpoint
