// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/ivalue.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torchfuse/export.h>

namespace torchfuse::optim {

class LRScheduler;

/// A scheduler's state: numbers, strings, lists and dictionaries, with the keys of Python's
/// `scheduler.state_dict()`.
using LRSchedulerState = std::map<std::string, c10::IValue>;

/// Visitor of a scheduler's state, which writes, checks or reads the entries. A scheduler visits
/// each entry once, in LRScheduler::visit_state().
///
/// When checking and reading, every function throws if the state lacks the entry or if the value
/// has the wrong type or range. The message names the class and the key. Entries that no scheduler
/// visits are ignored.
class TORCHFUSE_API LRSchedulerFields {
 public:
  /// Visits a number for which `valid` returns true; `range` says in words which numbers are valid.
  void number(const char* key, double& value, const char* range, bool (*valid)(double));
  /// Visits a finite number >= 0.
  void rate(const char* key, double& value);
  /// Visits an integer >= `at_least`.
  void integer(const char* key, std::int64_t& value, std::int64_t at_least);
  /// Visits a string from `choices`.
  void text(const char* key, std::string& value, const std::vector<std::string>& choices);
  /// Visits finite numbers, one per parameter group.
  void numbers(const char* key, std::vector<double>& values);
  /// Like numbers(), but leaves `values` unchanged if the state lacks the entry.
  void optional_numbers(const char* key, std::vector<double>& values);
  /// Visits a flag that the optimizer or the constructor determines; the state must agree.
  void same(const char* key, bool value);
  /// Writes an entry of Python's state that C++ does not read.
  void constant(const char* key, const c10::IValue& value);
  /// Visits the states of inner schedulers.
  void schedulers(const char* key, const std::vector<std::shared_ptr<LRScheduler>>& values);
  /// Visits any other entry. `read(value, prefix, assign)` throws for an invalid value, with a
  /// message that starts with `prefix`, and assigns the value only if `assign` is true.
  void entry(const char* key, const c10::IValue& written,
             const std::function<void(const c10::IValue&, const std::string&, bool)>& read);

 private:
  friend class LRScheduler;
  enum class Task { kWrite, kCheck, kRead };
  LRSchedulerFields(Task task, std::string owner, LRSchedulerState state, std::size_t groups)
      : task_(task), owner_(std::move(owner)), state_(std::move(state)), groups_(groups) {}

  Task task_;
  std::string owner_;
  LRSchedulerState state_;
  std::size_t groups_;
};

}  // namespace torchfuse::optim
