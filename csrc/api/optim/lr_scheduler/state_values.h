// SPDX-License-Identifier: BSD-3-Clause
// The values of a scheduler's state: in memory, in archives and in messages.
//
// Note [States in archives]
// An archive holds no dictionaries and no lists, but nested archives and tuples. A dictionary
// becomes a nested archive, a list of dictionaries one whose keys are the places, and any other
// list a tuple. Whoever reads a value takes both forms, so that states of Python need no
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

/// Whether a number is finite and at least 0.
bool is_rate(double value);

/// A number of any type, or the one in a tensor; none for other values.
std::optional<double> to_number(const c10::IValue& value);
/// The elements of a list or tuple; none for other values.
std::optional<std::vector<c10::IValue>> to_elements(const c10::IValue& value);
/// The states in a list, or in a state whose keys are places; none for other values.
std::optional<std::vector<LRSchedulerState>> to_states(const c10::IValue& value);
/// Integers by integers, whose keys may be strings; none for other values.
std::optional<std::map<std::int64_t, std::int64_t>> to_counts(const c10::IValue& value);

/// The states as a list of dictionaries.
c10::IValue to_ivalue(const std::vector<LRSchedulerState>& states);

/// The value, for a message.
std::string shown(const c10::IValue& value);

/// Writes the state under `key`.
void write_nested(torch::serialize::OutputArchive& archive, const std::string& key,
                  const LRSchedulerState& state);
/// Reads what write_nested() wrote. Throws, naming `owner`, if there is no such entry.
LRSchedulerState read_nested(torch::serialize::InputArchive& archive, const std::string& owner,
                             const std::string& key);

}  // namespace torchfuse::optim
