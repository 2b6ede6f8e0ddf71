// SPDX-License-Identifier: BSD-3-Clause
// State dicts with the interface of archives, and conversion of Python's values to archive values.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/jit_type.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "api/optim/archive.h"

namespace torchfuse::optim {

using StateDict = c10::impl::GenericDict;

inline StateDict make_state_dict() { return StateDict(c10::AnyType::get(), c10::AnyType::get()); }

/// A dictionary with string keys and InputArchive's interface for reading.
class StateArchive {
 public:
  StateArchive() : dict_(make_state_dict()) {}
  explicit StateArchive(StateDict dict) : dict_(std::move(dict)) {}

  bool try_read(const std::string& key, c10::IValue& value) const {
    const auto found = dict_.find(key);
    if (found == dict_.end()) return false;
    value = found->value();
    return true;
  }
  void write(const std::string& key, c10::IValue value) {
    dict_.insert_or_assign(key, std::move(value));
  }
  const StateDict& dict() const { return dict_; }

 private:
  StateDict dict_;
};

inline void read_nested(StateArchive& archive, const std::string& owner, const std::string& key,
                        StateArchive& nested) {
  nested = StateArchive(
      read_value(archive, owner, key, "a dict", &c10::IValue::isGenericDict).toGenericDict());
}

/// Converts an option from Python's state dict to the type of the option's default: an int to a
/// floating-point number, a list to a tuple, and a 1-element tensor to a number.
inline c10::IValue to_archived_option(const c10::IValue& value, const c10::IValue& standard) {
  if (value.isTensor() && value.toTensor().defined() && value.toTensor().numel() == 1) {
    return to_archived_option(c10::IValue(value.toTensor().item()), standard);
  }
  if (value.isInt() && !standard.isInt() && !standard.isBool()) {
    return static_cast<double>(value.toInt());
  }
  if (value.isString() && value.toStringRef().rfind("torch.", 0) == 0) {
    return value.toStringRef().substr(6);  // a dtype
  }
  if (!standard.isTuple() || !(value.isTuple() || value.isList())) return value;
  const auto& standards = standard.toTupleRef().elements();
  std::vector<c10::IValue> elements;
  const auto add = [&](const c10::IValue& element) {
    const std::size_t index = std::min(elements.size(), standards.size() - 1);
    elements.push_back(to_archived_option(element, standards[index]));
  };
  if (value.isTuple()) {
    for (const c10::IValue& element : value.toTupleRef().elements()) add(element);
  } else {
    for (const c10::IValue& element : value.toList()) add(element);
  }
  return c10::ivalue::Tuple::create(std::move(elements));
}

// --- Trust ratio bounds: Python stores a pair or None --------------------------------------------

inline void to_python_bounds(StateDict& group) {
  const auto least = group.find("min_trust_ratio");
  const auto most = group.find("max_trust_ratio");
  if (least == group.end() || most == group.end()) return;
  const double low = least->value().toDouble();
  const c10::IValue high = most->value();
  std::ignore = group.erase("min_trust_ratio");
  std::ignore = group.erase("max_trust_ratio");
  c10::IValue bounds;
  if (low != 0.0 || !high.isNone()) {
    bounds = c10::ivalue::Tuple::create(
        {low, high.isNone() ? c10::IValue(std::numeric_limits<double>::infinity()) : high});
  }
  group.insert_or_assign("trust_ratio_bounds", bounds);
}

inline void from_python_bounds(StateDict& group) {
  const auto found = group.find("trust_ratio_bounds");
  if (found == group.end()) return;
  const c10::IValue standard = c10::ivalue::Tuple::create({0.0, 0.0});
  const c10::IValue bounds = to_archived_option(found->value(), standard);
  c10::IValue low = 0.0;
  c10::IValue high;
  if (bounds.isTuple() && bounds.toTupleRef().elements().size() == 2) {
    low = bounds.toTupleRef().elements()[0];
    high = bounds.toTupleRef().elements()[1];
    if (high.isDouble() && std::isinf(high.toDouble())) high = c10::IValue();
  }
  group.insert_or_assign("min_trust_ratio", low);
  group.insert_or_assign("max_trust_ratio", high);
}

}  // namespace torchfuse::optim
