// SPDX-License-Identifier: BSD-3-Clause
#include "api/checkpoint/sharded_input.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <utility>

#include "api/checkpoint/container.h"
#include "api/checkpoint/contents.h"
#include "api/parallel/shards.h"

namespace torchfuse::checkpoint {

namespace {

constexpr const char* kStateExpected = "expected the state";

std::string where_of(const std::string& folder, const std::string& caller) {
  return caller + ": expected " + index_of(folder);
}

Dict read_index(const std::string& folder, const std::string& caller) {
  const std::string where = where_of(folder, caller);
  const Dict index = as_dict(read_container(index_of(folder), caller), where + " to hold an index");
  const Dict sharded = as_dict(entry(index, "sharded", where), where + " to hold 'sharded'");
  const c10::IValue format = entry(sharded, "format", where + "['sharded']");
  TORCH_CHECK_VALUE(format.isInt() && format.toInt() == kShardedFormat, where, " to be of format ",
                    kShardedFormat, ", got ", format, ". Read it with the version that wrote it.");
  return index;
}

std::string name_of(const SpanReader::Keys& keys) {
  return "expected state[" + key_name(keys[1]) + "][" + key_name(keys[2]) + "]";
}

}  // namespace

std::string index_of(const std::string& folder) { return folder + "/index.pt"; }

ShardedInput::ShardedInput(const std::string& folder, const std::string& caller)
    : ShardedInput(folder, caller, read_index(folder, caller)) {}

ShardedInput::ShardedInput(const std::string& folder, const std::string& caller, const Dict& index)
    : sharded_(index.at("sharded").toGenericDict()),
      contents_(checked_contents(entry(index, "checkpoint", where_of(folder, caller)),
                                 where_of(folder, caller))),
      reader_(folder, entry(sharded_, "files", where_of(folder, caller) + "['sharded']"), caller) {}

std::string ShardedInput::save() const {
  const List files = sharded_.at("files").toList();
  return files.empty() ? std::string() : files.get(0).toTupleRef().elements()[0].toStringRef();
}

bool ShardedInput::has(const std::string& name) const {
  const auto found = sharded_.find("optimizers");
  if (found == sharded_.end() || !found->value().isList()) return false;
  for (const c10::IValue& each : found->value().toList()) {
    if (each.isString() && each.toStringRef() == name) return true;
  }
  return false;
}

Dict ShardedInput::own_state(const std::string& name, const c10::IValue& saved,
                             const parallel::Shards& shards) {
  const auto read_part = [&](std::size_t index, const c10::IValue& param, const c10::IValue& key,
                             const Dict& place) {
    return own_part(shards, index, place, {name, param, key});
  };
  const Dict own = shards.own_state(as_dict(saved, kStateExpected), read_part);
  reader_.read();
  return own;
}

Dict ShardedInput::whole_state(const std::string& name, const c10::IValue& saved) {
  Dict whole = as_dict(saved, kStateExpected).copy();
  Dict states = as_dict(entry(whole, "state", kStateExpected), kStateExpected).copy();
  for (const auto& each : states) {
    Dict state = as_dict(each.value(), kStateExpected).copy();
    for (const auto& value : state) {
      if (!value.value().isGenericDict()) continue;
      const SpanReader::Keys keys{name, each.key(), value.key()};
      value.setValue(reader_.want(placed(value.value().toGenericDict(), keys), keys));
    }
    each.setValue(state);
  }
  reader_.read();
  whole.insert_or_assign("state", states);
  return whole;
}

PlacedTensor ShardedInput::placed(const Dict& place, const SpanReader::Keys& keys) const {
  return PlacedTensor::of(place, reader_.files(), name_of(keys));
}

/// A part that has its values after the next read.
at::Tensor ShardedInput::own_part(const parallel::Shards& shards, std::size_t index,
                                  const Dict& place, const SpanReader::Keys& keys) {
  const PlacedTensor whole = placed(place, keys);
  const at::Tensor& param = shards.params()[index];
  TORCH_CHECK_VALUE(param.sizes() == at::IntArrayRef(whole.sizes), name_of(keys),
                    " to have the sizes ", param.sizes(), " of its parameter, got ",
                    at::IntArrayRef(whole.sizes), ".");
  if (whole.is_laid_out_like(param)) {
    const auto [begin, end] = shards.partition().own(index);
    return reader_.want(whole, keys, begin, end);
  }
  // Its elements are here and there in the files: one tensor at a time is read as a whole.
  const at::Tensor values = reader_.want(whole, keys);
  reader_.read();
  return shards.partition().part_of(index, parallel::laid_out_like(param, values)).clone();
}

}  // namespace torchfuse::checkpoint
