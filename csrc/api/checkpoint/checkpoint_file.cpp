// SPDX-License-Identifier: BSD-3-Clause
// Writes a checkpoint to one file, and loads it.
#include <torchfuse/checkpoint.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torchfuse/version.h>

#include <cstring>

#include "api/checkpoint/container.h"
#include "api/checkpoint/parts.h"
#include "api/message_of.h"
#include "api/parallel/collectives.h"
#include "api/parallel/shards.h"

namespace torchfuse {

/// The ranks of a group or, without a group, this process alone.
class checkpoint::Ranks {
 public:
  /// @param caller start of error messages.
  Ranks(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& caller) {
    if (group) collectives_.emplace(group, caller);
  }

  std::int64_t rank() const { return collectives_ ? collectives_->rank() : 0; }
  std::int64_t size() const { return collectives_ ? collectives_->size() : 1; }
  /// Returns each rank's bytes, in rank order. A collective.
  std::vector<std::string> gather(const std::string& mine) const {
    if (!collectives_) return {mine};
    const c10::Device device(collectives_->has_cpu() ? at::kCPU : at::kCUDA);
    return parallel::gather_texts(*collectives_, device, mine, "this call");
  }

  /// Calls `action` on every rank. If `action` throws on any rank, all ranks throw the error of the
  /// first such rank. A collective.
  void all_or_none(const std::function<void()>& action) const {
    std::string failure;
    try {
      action();
    } catch (const std::exception& error) {
      if (size() == 1) throw;
      failure = message_of(error);
    }
    for (const std::string& each : gather(failure)) TORCH_CHECK_VALUE(each.empty(), each);
  }

 private:
  std::optional<parallel::Collectives> collectives_;
};

namespace {

using checkpoint::Dict;
using checkpoint::List;
using checkpoint::Ranks;

constexpr std::int64_t kFormat = 1;
constexpr const char* kSave = "save_checkpoint";
constexpr const char* kLoad = "load_checkpoint";
constexpr std::size_t kCudaStateBytes = 16;  ///< seed and offset

std::string bytes_of(const at::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
}

at::Tensor tensor_of(const char* bytes, std::size_t size) {
  at::Tensor tensor = at::empty({static_cast<std::int64_t>(size)}, at::kByte);
  std::memcpy(tensor.mutable_data_ptr(), bytes, size);
  return tensor;
}

/// Returns all ranks' generator states.
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
                    "expected the generator states of ", ranks.size(), " processes, got ",
                    states.size(), ". To load with another number of processes, leave out rng().");
  return checkpoint::prepare_generators(states.get(static_cast<std::size_t>(ranks.rank())));
}

/// Returns the dictionary `value`, after checking that save_checkpoint() wrote it.
/// @param where "load_checkpoint: expected <file>", for error messages.
Dict checked_contents(const c10::IValue& value, const std::string& where) {
  const Dict contents = checkpoint::as_dict(value, where + " to hold a checkpoint");
  TORCH_CHECK_VALUE(contents.contains("torchfuse"), where,
                    " to be a file of save_checkpoint, got one that holds ",
                    checkpoint::listed(contents), ".");
  const Dict torchfuse =
      checkpoint::as_dict(contents.at("torchfuse"), where + " to hold 'torchfuse'");
  const c10::IValue format = checkpoint::entry(torchfuse, "format", where + "['torchfuse']");
  TORCH_CHECK_VALUE(format.isInt() && format.toInt() == kFormat, where, " to be of format ",
                    kFormat, ", got ",
                    format.isInt() ? std::to_string(format.toInt()) : checkpoint::type_name(format),
                    ". Read it with the version that wrote it.");
  return contents;
}

/// Returns the class name that the file stores for a part, if any.
std::optional<std::string> class_of(const Dict& contents, const std::string& part) {
  const Dict torchfuse = contents.at("torchfuse").toGenericDict();
  const auto classes = torchfuse.find("classes");
  if (classes == torchfuse.end() || !classes->value().isGenericDict()) return std::nullopt;
  const Dict names = classes->value().toGenericDict();
  const auto found = names.find(part);
  if (found == names.end() || !found->value().isString()) return std::nullopt;
  return found->value().toStringRef();
}

/// Calls `save`, and adds the part's name to an error about a value that cannot be saved.
template <class Save>
c10::IValue saved_part(const std::string& name, const Save& save) {
  try {
    return save();
  } catch (const c10::ValueError& error) {
    TORCH_CHECK_VALUE(false, kSave, ": '", name, "' cannot be saved: ", message_of(error));
  }
}

}  // namespace

Checkpoint::Saved Checkpoint::save_together(const Ranks& ranks) const {
  Saved saved;
  for (const auto& [name, sharded] : sharded_) {
    const auto& [optimizer, shards] = sharded;
    TORCH_CHECK_VALUE(ranks.size() >= shards->size(), kSave, ": expected a group of at least ",
                      shards->size(), " processes, because the states of '", name,
                      "' are sharded over ", shards->size(), ", got ", ranks.size(),
                      ". Call group(group) on the checkpoint, and save on every rank.");
    saved[name] = saved_part(name, [&]() -> c10::IValue {
      return shards->whole_state(shards->state_of_shards(*optimizer), ranks.rank() == 0);
    });
  }
  if (rng_) saved[*rng_] = all_generator_states(ranks);
  return saved;
}

Dict Checkpoint::contents(const Saved& saved) const {
  check_schedulers(kSave);
  Dict contents = checkpoint::make_dict();
  for (const auto& [name, part] : parts_) {
    const auto known = saved.find(name);
    contents.insert_or_assign(name,
                              known != saved.end() ? known->second : saved_part(name, part.save));
  }
  Dict values = checkpoint::make_dict();
  for (const auto& [name, value] : values_) values.insert_or_assign(name, value);
  Dict classes = checkpoint::make_dict();
  for (const auto& [name, known] : classes_) classes.insert_or_assign(name, known);
  Dict torchfuse = checkpoint::make_dict();
  torchfuse.insert_or_assign("format", kFormat);
  torchfuse.insert_or_assign("version", TORCHFUSE_VERSION);
  torchfuse.insert_or_assign("classes", classes);
  contents.insert_or_assign("values", values);
  contents.insert_or_assign("torchfuse", torchfuse);
  return contents;
}

void save_checkpoint(const std::string& path, const Checkpoint& description) {
  const at::NoGradGuard no_grad;
  const Ranks ranks(description.group_, kSave);
  const Checkpoint::Saved saved = description.save_together(ranks);
  ranks.all_or_none([&] {
    if (ranks.rank() != 0) return;
    checkpoint::write_container(path, description.contents(saved), kSave);
  });
}

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
  const std::string where = std::string(kLoad) + ": expected " + path;
  std::vector<std::function<void()>> loads;
  std::map<std::string, c10::IValue> values;
  std::uint64_t sum = 0;
  ranks.all_or_none([&] {
    description.check_schedulers(kLoad);
    const checkpoint::Container file = checkpoint::read_container(path, kLoad);
    sum = file.sum;
    const Dict contents = checked_contents(file.value, where);
    for (const auto& [name, part] : description.parts_) {
      const c10::IValue saved = checkpoint::entry(contents, name, where);
      const auto known = description.classes_.find(name);
      const auto written = class_of(contents, name);
      TORCH_CHECK_VALUE(
          known == description.classes_.end() || !written || *written == known->second, where,
          " to hold the state of ", known->second, " as '", name, "', got the state of ", *written,
          ".");
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
  });
  const auto sums = ranks.gather(std::to_string(sum));
  for (std::size_t rank = 1; rank < sums.size(); ++rank) {
    TORCH_CHECK_VALUE(sums[rank] == sums[0], where,
                      " to be the same file on all ranks, got a different file on rank ", rank,
                      " than on rank 0. Copy one file to all machines, or "
                      "read it from a folder that they share.");
  }
  // All ranks have read and checked everything. From here on nothing throws.
  for (const auto& load : loads) load();
  return {path, std::move(values)};
}

}  // namespace torchfuse
