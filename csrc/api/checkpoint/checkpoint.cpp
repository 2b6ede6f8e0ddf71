// SPDX-License-Identifier: BSD-3-Clause
// Builds the description of a checkpoint: how torchfuse's classes save and load.
#include <torchfuse/checkpoint.h>

#include <c10/util/Exception.h>
#include <torchfuse/parallel/sharded_optimizer.h>

#include <algorithm>

#include "api/checkpoint/model_state.h"
#include "api/checkpoint/parts.h"

namespace torchfuse {

namespace {

using checkpoint::Dict;

constexpr const char* kExpected = "expected the state";

double number(const Dict& saved, const char* key) {
  c10::IValue value = checkpoint::entry(saved, key, kExpected);
  // Python's scaler stores ints if it was constructed with ints.
  if (value.isInt()) value = static_cast<double>(value.toInt());
  TORCH_CHECK_VALUE(value.isDouble(), kExpected, "['", key, "'] to be a number, got a ",
                    checkpoint::type_name(value), ".");
  return value.toDouble();
}

std::int64_t integer(const Dict& saved, const char* key) {
  const c10::IValue value = checkpoint::entry(saved, key, kExpected);
  TORCH_CHECK_VALUE(value.isInt(), kExpected, "['", key, "'] to be an int, got a ",
                    checkpoint::type_name(value), ".");
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

Checkpoint& Checkpoint::model(torch::nn::Module& model, std::string name) {
  const auto save = [&model]() -> c10::IValue {
    Dict state = checkpoint::make_dict();
    for (const auto& [key, tensor] : checkpoint::named_tensors(model)) {
      state.insert_or_assign(key, tensor.detach());
    }
    return state;
  };
  const auto prepare = [&model](const c10::IValue& saved) {
    return checkpoint::prepare_model(model, checkpoint::as_dict(saved, kExpected), kExpected);
  };
  return add(std::move(name), {save, prepare});
}

Checkpoint& Checkpoint::optimizer(optim::FusedOptimizer& optimizer, std::string name) {
  classes_[name] = optimizer.name();
  optimizers_.push_back(&optimizer);
  if (const auto* sharded = dynamic_cast<const parallel::ShardedBase*>(&optimizer)) {
    if (sharded->shards_ != nullptr) sharded_[name] = {&optimizer, sharded->shards_};
  }
  const auto prepare = [&optimizer](const c10::IValue& saved) {
    return optimizer.prepare_state_dict(checkpoint::as_dict(saved, kExpected));
  };
  return add(std::move(name),
             {[&optimizer]() -> c10::IValue { return optimizer.state_dict(); }, prepare});
}

Checkpoint& Checkpoint::scaler(amp::GradScaler& scaler, std::string name) {
  const auto save = [&scaler]() -> c10::IValue {
    Dict saved = checkpoint::make_dict();
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
    const Dict saved = checkpoint::as_dict(value, kExpected);
    TORCH_CHECK_VALUE(!saved.empty(), kExpected,
                      " of an enabled GradScaler, got a disabled scaler's state.");
    const amp::GradScalerState state = scaler_state(saved);
    // A temporary scaler checks the values, so that `scaler` does not change.
    amp::GradScaler(at::kCPU).load_state_dict(state);
    return [&scaler, state] { scaler.load_state_dict(state); };
  };
  return add(std::move(name), {save, prepare});
}

Checkpoint& Checkpoint::scheduler(optim::LRScheduler& scheduler, std::string name) {
  classes_[name] = scheduler.name();
  scheduled_optimizers_[name] = &scheduler.optimizer();
  const auto save = [&scheduler]() -> c10::IValue {
    Dict saved = checkpoint::make_dict();
    for (const auto& [key, value] : scheduler.state_dict()) saved.insert_or_assign(key, value);
    return saved;
  };
  const auto prepare = [&scheduler](const c10::IValue& value) -> std::function<void()> {
    optim::LRSchedulerState state;
    for (const auto& item : checkpoint::as_dict(value, kExpected)) {
      if (item.key().isString()) state[item.key().toStringRef()] = item.value();
    }
    // Only the scheduler can check its state, so load the new state, and then restore the old
    // state.
    const optim::LRSchedulerState own = scheduler.state_dict();
    scheduler.load_state_dict(state);
    scheduler.load_state_dict(own);
    return [&scheduler, state] { scheduler.load_state_dict(state); };
  };
  return add(std::move(name), {save, prepare});
}

Checkpoint& Checkpoint::sampler(parallel::DistributedSampler& sampler, std::int64_t& drawn,
                                std::string name) {
  const auto save = [&sampler, &drawn]() -> c10::IValue {
    check_position(drawn, "expected drawn", sampler.size(),
                   "Count the samples that this process has drawn in the epoch.");
    Dict saved = checkpoint::make_dict();
    saved.insert_or_assign("epoch", sampler.epoch());
    saved.insert_or_assign("position", drawn);
    return saved;
  };
  const auto prepare = [&sampler, &drawn](const c10::IValue& value) -> std::function<void()> {
    const Dict saved = checkpoint::as_dict(value, kExpected);
    const std::int64_t epoch = integer(saved, "epoch");
    const std::int64_t position = integer(saved, "position");
    check_position(position, std::string(kExpected) + "['position']", sampler.size(),
                   "Use the data set and the number of processes of the saved run.");
    return [&sampler, &drawn, epoch, position] {
      sampler.resume(epoch, static_cast<std::size_t>(position));
      drawn = position;
    };
  };
  return add(std::move(name), {save, prepare});
}

Checkpoint& Checkpoint::archived(std::string name,
                                 std::function<void(torch::serialize::OutputArchive&)> save,
                                 std::function<void(torch::serialize::InputArchive&)> load) {
  TORCH_CHECK_VALUE(save && load, "Checkpoint: expected '", name,
                    "' to have functions that save and load it, got an empty one.");
  return part(std::move(name), checkpoint::archived_part(std::move(save), std::move(load)));
}

Checkpoint& Checkpoint::rng(std::string name) {
  // These functions do nothing, because save_together() and prepare_rng() exchange the states over
  // the group.
  add(name, {[] { return c10::IValue(); }, [](const c10::IValue&) { return [] {}; }});
  rng_ = std::move(name);
  return *this;
}

Checkpoint& Checkpoint::part(std::string name, CheckpointPart part) {
  add(std::move(name), std::move(part));
  has_others_ = true;
  return *this;
}

Checkpoint& Checkpoint::add(std::string name, CheckpointPart part) {
  TORCH_CHECK_VALUE(!name.empty() && name != "values" && name != "torchfuse",
                    "Checkpoint: expected a name other than '', 'values' and 'torchfuse', got '",
                    name, "'.");
  const auto has_name = [&](const auto& other) { return other.first == name; };
  TORCH_CHECK_VALUE(std::none_of(parts_.begin(), parts_.end(), has_name),
                    "Checkpoint: expected each part to have its own name, got '", name,
                    "' twice. Pass names: model(critic, \"critic\").");
  TORCH_CHECK_VALUE(part.save && part.prepare, "Checkpoint: expected '", name,
                    "' to have functions that save and prepare it, got an empty one.");
  parts_.emplace_back(std::move(name), std::move(part));
  return *this;
}

Checkpoint& Checkpoint::value(std::string name, c10::IValue value) {
  values_.insert_or_assign(std::move(name), std::move(value));
  return *this;
}

Checkpoint& Checkpoint::group(const parallel::ProcessGroup& group) {
  group_ = group.get();
  return *this;
}

// A scheduler that resumes without its optimizer's learning rates would continue with wrong rates.
// Archived parts may contain any optimizer, and always contain torch's, so they disable the check.
void Checkpoint::check_schedulers(const std::string& caller) const {
  if (has_others_) return;
  for (const auto& [name, optimizer] : scheduled_optimizers_) {
    const auto* const fused = dynamic_cast<const optim::FusedOptimizer*>(optimizer);
    const bool known = fused == nullptr || std::find(optimizers_.begin(), optimizers_.end(),
                                                     optimizer) != optimizers_.end();
    TORCH_CHECK_VALUE(
        known, caller, ": expected '", name,
        "' to be the scheduler of an optimizer in the checkpoint, got the scheduler of a ",
        fused->name(),
        " that is not in it. Add this optimizer, or build the scheduler for an "
        "optimizer in the checkpoint.");
  }
}

}  // namespace torchfuse
