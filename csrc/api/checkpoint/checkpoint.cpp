// SPDX-License-Identifier: BSD-3-Clause
#include <torchfuse/checkpoint.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torchfuse/version.h>

#include <algorithm>
#include <cstring>

#include "api/checkpoint/agreement.h"
#include "api/checkpoint/container.h"
#include "api/checkpoint/parts.h"

namespace torchfuse {

namespace {

using checkpoint::Dict;
using checkpoint::List;
using checkpoint::message_of;
using checkpoint::Ranks;

constexpr const char* kSave = "save_checkpoint";
constexpr const char* kLoad = "load_checkpoint";
constexpr std::int64_t kFormat = 1;
constexpr std::size_t kCudaStateBytes = 16;  ///< seed and offset

std::string bytes_of(const at::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
}

at::Tensor tensor_of(const char* bytes, std::size_t size) {
  at::Tensor tensor = at::empty({static_cast<std::int64_t>(size)}, at::kByte);
  std::memcpy(tensor.mutable_data_ptr(), bytes, size);
  return tensor;
}

/// The generators' states of all ranks.
List all_generator_states(const Ranks& ranks) {
  const Dict own = checkpoint::generator_states();
  std::string cuda;
  for (const c10::IValue& state : own.at("cuda").toList()) cuda += bytes_of(state.toTensor());
  const auto cpu_states = ranks.gather(bytes_of(own.at("cpu").toTensor()));
  const auto cuda_states = ranks.gather(cuda);
  List states = checkpoint::make_list();
  for (std::size_t rank = 0; rank < cpu_states.size(); ++rank) {
    Dict state = checkpoint::make_dict();
    state.insert_or_assign("cpu", tensor_of(cpu_states[rank].data(), cpu_states[rank].size()));
    List devices = checkpoint::make_list();
    for (std::size_t at = 0; at < cuda_states[rank].size(); at += kCudaStateBytes) {
      devices.push_back(tensor_of(cuda_states[rank].data() + at, kCudaStateBytes));
    }
    state.insert_or_assign("cuda", devices);
    states.push_back(state);
  }
  return states;
}

std::function<void()> prepare_rng(const c10::IValue& saved, const Ranks& ranks) {
  TORCH_CHECK_VALUE(saved.isList(), "expected a list of the processes' states, got a ",
                    checkpoint::type_name(saved), ".");
  const auto states = saved.toList();
  TORCH_CHECK_VALUE(static_cast<std::int64_t>(states.size()) == ranks.size(),
                    "expected the states of ", ranks.size(), " processes, got those of ",
                    states.size(), ". Load without rng() in another number of processes.");
  return checkpoint::prepare_generators(states.get(static_cast<std::size_t>(ranks.rank())));
}

}  // namespace

Checkpoint& Checkpoint::model(torch::nn::Module& model, std::string name) {
  return add(std::move(name), checkpoint::model_part(model));
}

Checkpoint& Checkpoint::optimizer(optim::FusedOptimizer& optimizer, std::string name) {
  classes_[name] = optimizer.name();
  optimizers_.push_back(&optimizer);
  if (optimizer.num_shards() > 1) shards_[name] = optimizer.num_shards();
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
  // The processes exchange their states: only the description knows the group.
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
                    "Checkpoint: expected each part to have a name of its own, got '", name,
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

// With the epoch of a scheduler and other rates than its optimizer had, a run goes on with wrong
// rates. Any optimizer may be in a part of the program's own, as those of torch always are.
void Checkpoint::check_schedulers(const char* caller) const {
  if (has_others_) return;
  for (const auto& [name, optimizer] : scheduled_optimizers_) {
    const auto* const fused = dynamic_cast<const optim::FusedOptimizer*>(optimizer);
    const bool known = fused == nullptr || std::find(optimizers_.begin(), optimizers_.end(),
                                                     optimizer) != optimizers_.end();
    TORCH_CHECK_VALUE(known, caller, ": expected '", name,
                      "' to be the scheduler of an optimizer in the checkpoint, got that of a ",
                      fused->name(),
                      " that is not in it. Add this optimizer, or build the scheduler for one that "
                      "is.");
  }
}

namespace {

c10::IValue saved_part(const std::string& name, const CheckpointPart& part) {
  try {
    return part.save();
  } catch (const c10::ValueError& error) {
    TORCH_CHECK_VALUE(false, kSave, ": '", name, "' cannot be saved: ", message_of(error));
  }
}

}  // namespace

std::map<std::string, c10::IValue> Checkpoint::save_shared(const Ranks& ranks) const {
  std::map<std::string, c10::IValue> saved;
  for (const auto& [name, part] : parts_) {
    if (!shards_.contains(name)) continue;
    TORCH_CHECK_VALUE(ranks.size() >= shards_.at(name), kSave, ": expected a group of the ",
                      shards_.at(name), " processes that share the states of '", name, "', got ",
                      ranks.size(), " in all. Call group(group), and save in each of them.");
    saved[name] = saved_part(name, part);
  }
  if (rng_) saved[*rng_] = all_generator_states(ranks);
  return saved;
}

void save_checkpoint(const std::string& path, const Checkpoint& description) {
  const at::NoGradGuard no_grad;
  const Ranks ranks(description.group_, kSave);
  const auto kept = description.save_shared(ranks);
  std::string failure;
  if (ranks.rank() == 0) {
    try {
      description.check_schedulers(kSave);
      Dict contents = checkpoint::make_dict();
      for (const auto& [name, part] : description.parts_) {
        contents.insert_or_assign(name, kept.count(name) ? kept.at(name) : saved_part(name, part));
      }
      Dict values = checkpoint::make_dict();
      for (const auto& [name, value] : description.values_) values.insert_or_assign(name, value);
      Dict classes = checkpoint::make_dict();
      for (const auto& [name, known] : description.classes_) classes.insert_or_assign(name, known);
      Dict torchfuse = checkpoint::make_dict();
      torchfuse.insert_or_assign("format", kFormat);
      torchfuse.insert_or_assign("version", TORCHFUSE_VERSION);
      torchfuse.insert_or_assign("classes", classes);
      contents.insert_or_assign("values", values);
      contents.insert_or_assign("torchfuse", torchfuse);
      checkpoint::write_container(path, contents, kSave);
    } catch (const std::exception& error) {
      if (ranks.size() == 1) throw;
      failure = message_of(error);
    }
  }
  ranks.agree(failure);
}

namespace {

/// The file's contents, after checking that save_checkpoint() wrote it.
Dict read_contents(const std::string& path) {
  const std::string where = std::string(kLoad) + ": expected " + path;
  const Dict contents =
      checkpoint::as_dict(checkpoint::read_container(path, kLoad), where + " to hold a checkpoint");
  TORCH_CHECK_VALUE(contents.contains("torchfuse"), where,
                    " to be a file of save_checkpoint, got one that holds ",
                    checkpoint::listed(contents), ".");
  const Dict torchfuse =
      checkpoint::as_dict(contents.at("torchfuse"), where + " to hold 'torchfuse'");
  const c10::IValue format = checkpoint::entry(torchfuse, "format", where + "['torchfuse']");
  TORCH_CHECK_VALUE(format.isInt() && format.toInt() == kFormat, where, " to be of format ",
                    kFormat, ", got ", format, ". Read it with the version that wrote it.");
  return contents;
}

/// The class that the file names for a part, if any.
std::optional<std::string> class_of(const Dict& contents, const std::string& part) {
  const Dict torchfuse = contents.at("torchfuse").toGenericDict();
  const auto classes = torchfuse.find("classes");
  if (classes == torchfuse.end() || !classes->value().isGenericDict()) return std::nullopt;
  const Dict names = classes->value().toGenericDict();
  const auto found = names.find(part);
  if (found == names.end() || !found->value().isString()) return std::nullopt;
  return found->value().toStringRef();
}

}  // namespace

CheckpointValues::CheckpointValues(std::string path, std::map<std::string, c10::IValue> values)
    : path_(std::move(path)), values_(std::move(values)) {}

const c10::IValue& CheckpointValues::at(const std::string& name) const {
  const auto found = values_.find(name);
  if (found != values_.end()) return found->second;
  std::string known;
  for (const auto& item : values_) known += (known.empty() ? "'" : ", '") + item.first + "'";
  TORCH_CHECK_VALUE(false, kLoad, ": expected ", path_, " to hold a value '", name, "', got ",
                    known.empty() ? "none" : known, ". Save it with value(\"", name, "\", ...).");
}

CheckpointValues load_checkpoint(const std::string& path, const Checkpoint& description) {
  const at::NoGradGuard no_grad;
  const Ranks ranks(description.group_, kLoad);
  std::vector<std::function<void()>> loads;
  std::map<std::string, c10::IValue> values;
  std::string failure;
  try {
    description.check_schedulers(kLoad);
    const Dict contents = read_contents(path);
    const std::string where = std::string(kLoad) + ": expected " + path;
    for (const auto& [name, part] : description.parts_) {
      const c10::IValue saved = checkpoint::entry(contents, name, where);
      const auto known = description.classes_.find(name);
      const auto written = class_of(contents, name);
      TORCH_CHECK_VALUE(
          known == description.classes_.end() || !written || *written == known->second, where,
          " to hold the state of ", known->second, " as '", name, "', got that of ", *written, ".");
      try {
        loads.push_back(description.rng_ == name ? prepare_rng(saved, ranks) : part.prepare(saved));
        TORCH_CHECK_VALUE(loads.back(), "expected prepare to return a function, got an empty one.");
      } catch (const std::exception& error) {
        TORCH_CHECK_VALUE(false, kLoad, ": ", path, "'s '", name,
                          "' does not fit: ", message_of(error));
      }
    }
    const c10::IValue own = checkpoint::entry(contents, "values", where);
    for (const auto& item : checkpoint::as_dict(own, where + " to hold 'values'")) {
      TORCH_CHECK_VALUE(item.key().isString(), where, "['values'] to have strings as keys, got ",
                        checkpoint::key_name(item.key()), ".");
      values.emplace(item.key().toStringRef(), item.value());
    }
  } catch (const std::exception& error) {
    if (ranks.size() == 1) throw;
    failure = message_of(error);
  }
  ranks.agree(failure);
  // Everything is read and checked in all ranks; from here on nothing is refused.
  for (const auto& load : loads) load();
  return {path, std::move(values)};
}

}  // namespace torchfuse
