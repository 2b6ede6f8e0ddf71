// SPDX-License-Identifier: BSD-3-Clause
#include "api/optim/lr_scheduler/state_values.h"

#include <ATen/ATen.h>
#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>

#include <charconv>
#include <cmath>
#include <sstream>
#include <utility>

namespace torchfuse::optim {
namespace {

std::optional<std::int64_t> to_integer(const c10::IValue& key) {
  if (key.isInt()) return key.toInt();
  if (!key.isString()) return std::nullopt;
  const std::string& text = key.toStringRef();
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

std::optional<LRSchedulerState> to_state(const c10::IValue& value) {
  if (!value.isGenericDict()) return std::nullopt;
  LRSchedulerState state;
  for (const auto& entry : value.toGenericDict()) {
    if (!entry.key().isString()) return std::nullopt;
    state[entry.key().toStringRef()] = entry.value();
  }
  return state;
}

void write_value(torch::serialize::OutputArchive& archive, const std::string& key,
                 const c10::IValue& value) {
  if (value.isList() && !value.toListRef().empty() && value.toListRef()[0].isGenericDict()) {
    LRSchedulerState places;
    for (const c10::IValue& element : value.toListRef()) {
      places[std::to_string(places.size())] = element;
    }
    write_nested(archive, key, places);
  } else if (value.isList()) {
    archive.write(key, c10::ivalue::Tuple::create(value.toListRef().vec()));
  } else if (value.isGenericDict()) {
    LRSchedulerState state;
    for (const auto& entry : value.toGenericDict()) {
      const c10::IValue& name = entry.key();
      state[name.isInt() ? std::to_string(name.toInt()) : name.toStringRef()] = entry.value();
    }
    write_nested(archive, key, state);
  } else {
    archive.write(key, value);
  }
}

c10::IValue to_ivalue(const LRSchedulerState& state) {
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  for (const auto& [key, value] : state) dict.insert(key, value);
  return dict;
}

LRSchedulerState read_all(torch::serialize::InputArchive& archive) {
  LRSchedulerState state;
  for (const std::string& key : archive.keys()) {
    c10::IValue value;
    archive.read(key, value);
    if (value.isModule()) {
      torch::serialize::InputArchive nested;
      archive.read(key, nested);
      value = to_ivalue(read_all(nested));
    }
    state[key] = value;
  }
  return state;
}

}  // namespace

bool is_rate(double value) { return std::isfinite(value) && value >= 0.0; }

std::optional<double> to_number(const c10::IValue& value) {
  if (value.isInt()) return static_cast<double>(value.toInt());
  if (value.isDouble()) return value.toDouble();
  // Python saves rates as tensors if the optimizer's rates are tensors.
  if (value.isTensor() && value.toTensor().defined() && value.toTensor().numel() == 1) {
    return to_number(c10::IValue(value.toTensor().item()));
  }
  return std::nullopt;
}

std::optional<std::vector<c10::IValue>> to_elements(const c10::IValue& value) {
  if (value.isList()) return value.toListRef().vec();
  if (!value.isTuple()) return std::nullopt;
  const auto& elements = value.toTupleRef().elements();
  return std::vector<c10::IValue>(elements.begin(), elements.end());
}

std::optional<std::vector<LRSchedulerState>> to_states(const c10::IValue& value) {
  std::vector<c10::IValue> elements;
  if (value.isList()) {
    elements = value.toListRef().vec();
  } else {
    const std::optional<LRSchedulerState> places = to_state(value);
    if (!places) return std::nullopt;
    for (std::size_t i = 0; i < places->size(); ++i) {
      const auto found = places->find(std::to_string(i));
      if (found == places->end()) return std::nullopt;
      elements.push_back(found->second);
    }
  }
  std::vector<LRSchedulerState> states;
  for (const c10::IValue& element : elements) {
    std::optional<LRSchedulerState> state = to_state(element);
    if (!state) return std::nullopt;
    states.push_back(std::move(*state));
  }
  return states;
}

std::optional<std::map<std::int64_t, std::int64_t>> to_counts(const c10::IValue& value) {
  if (!value.isGenericDict()) return std::nullopt;
  std::map<std::int64_t, std::int64_t> counts;
  for (const auto& entry : value.toGenericDict()) {
    const std::optional<std::int64_t> key = to_integer(entry.key());
    if (!key || !entry.value().isInt()) return std::nullopt;
    counts[*key] = entry.value().toInt();
  }
  return counts;
}

c10::IValue to_ivalue(const std::vector<LRSchedulerState>& states) {
  c10::impl::GenericList list(c10::AnyType::get());
  for (const LRSchedulerState& state : states) list.push_back(to_ivalue(state));
  return list;
}

std::string shown(const c10::IValue& value) {
  if (value.isBool()) return value.toBool() ? "true" : "false";
  std::ostringstream text;
  text << value;
  return text.str();
}

void write_nested(torch::serialize::OutputArchive& archive, const std::string& key,
                  const LRSchedulerState& state) {
  torch::serialize::OutputArchive nested(archive.compilation_unit());
  for (const auto& [name, value] : state) write_value(nested, name, value);
  archive.write(key, nested);
}

LRSchedulerState read_nested(torch::serialize::InputArchive& archive, const std::string& owner,
                             const std::string& key) {
  c10::IValue value;
  TORCH_CHECK_VALUE(archive.try_read(key, value) && value.isModule(), owner,
                    ": expected the archive to hold a nested archive ", key,
                    ", got none. Load an archive that torch::save wrote for a scheduler.");
  torch::serialize::InputArchive nested;
  archive.read(key, nested);
  return read_all(nested);
}

}  // namespace torchfuse::optim
