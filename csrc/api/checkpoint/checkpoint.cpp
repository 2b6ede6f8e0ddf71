// SPDX-License-Identifier: BSD-3-Clause
// Builds the description of a checkpoint.
#include <torchfuse/checkpoint.h>

#include <c10/util/Exception.h>
#include <torchfuse/parallel/sharded_optimizer.h>

#include <algorithm>

#include "api/checkpoint/parts.h"

namespace torchfuse {

Checkpoint& Checkpoint::model(torch::nn::Module& model, std::string name) {
  return add(std::move(name), checkpoint::model_part(model));
}

Checkpoint& Checkpoint::optimizer(optim::FusedOptimizer& optimizer, std::string name) {
  classes_[name] = optimizer.name();
  optimizers_.push_back(&optimizer);
  if (const auto* sharded = dynamic_cast<const parallel::ShardedBase*>(&optimizer)) {
    if (sharded->shards_ != nullptr) sharded_[name] = {&optimizer, sharded->shards_};
  }
  return add(std::move(name), checkpoint::optimizer_part(optimizer));
}

Checkpoint& Checkpoint::scaler(amp::GradScaler& scaler, std::string name) {
  return add(std::move(name), checkpoint::scaler_part(scaler));
}

Checkpoint& Checkpoint::scheduler(optim::LRScheduler& scheduler, std::string name) {
  classes_[name] = scheduler.name();
  scheduled_optimizers_[name] = &scheduler.optimizer();
  return add(std::move(name), checkpoint::scheduler_part(scheduler));
}

Checkpoint& Checkpoint::sampler(parallel::DistributedSampler& sampler, std::int64_t& drawn,
                                std::string name) {
  return add(std::move(name), checkpoint::sampler_part(sampler, drawn));
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
