// SPDX-License-Identifier: BSD-3-Clause
// Conversion of a scheduler's state values to and from archives, and to text.
//
// Note [States in archives]
// Archives support nested archives and tuples, but neither dictionaries nor lists. A dictionary
// becomes a nested archive. A list of dictionaries becomes a nested archive whose keys are the
// indices. Any other list becomes a tuple. Readers accept both forms, so Python's states need no
// conversion.
#pragma once

#include <torch/serialize/archive.h>
#include <torchfuse/optim/lr_scheduler/state.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace torchfuse::optim {

inline constexpr const char* kSchedulerFormat = "torchfuse.optim.lr_scheduler.1";
inline constexpr const char* kRateRange = "finite and at least 0";

/// Returns whether a number is finite and at least 0.
bool is_rate(double value);

/// Returns a number of any type or a 1-element tensor's number; `nullopt` for other values.
std::optional<double> to_number(const c10::IValue& value);
/// Returns the elements of a list or tuple; `nullopt` for other values.
std::optional<std::vector<c10::IValue>> to_elements(const c10::IValue& value);
/// Returns the states in a list, or in a dictionary whose keys are indices; `nullopt` otherwise.
std::optional<std::vector<LRSchedulerState>> to_states(const c10::IValue& value);
/// Returns a map from integers to integers; keys may be strings. `nullopt` for other values.
std::optional<std::map<std::int64_t, std::int64_t>> to_counts(const c10::IValue& value);

/// Returns the states as a list of dictionaries.
c10::IValue to_ivalue(const std::vector<LRSchedulerState>& states);

/// Returns the value as text.
std::string shown(const c10::IValue& value);

/// Writes the state under `key`.
void write_nested(torch::serialize::OutputArchive& archive, const std::string& key,
                  const LRSchedulerState& state);
/// Reads a state that write_nested() wrote. Throws, naming `owner`, if there is none.
LRSchedulerState read_nested(torch::serialize::InputArchive& archive, const std::string& owner,
                             const std::string& key);

}  // namespace torchfuse::optim
