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

/// The state of a scheduler: numbers, strings, lists and dictionaries under the names of Python's
/// `scheduler.state_dict()`.
using LRSchedulerState = std::map<std::string, c10::IValue>;

/// The entries of a scheduler's state. A scheduler names each entry once, in
/// LRScheduler::visit_state(); this class writes them, checks them or reads them.
///
/// Every function throws where the state lacks the entry or holds one of another type or range. The
/// message names the class and the key. Entries that no scheduler names are ignored.
class TORCHFUSE_API LRSchedulerFields {
 public:
  /// A number for which `valid` holds; `range` says in words for which it does.
  void number(const char* key, double& value, const char* range, bool (*valid)(double));
  /// A finite number of at least 0.
  void rate(const char* key, double& value);
  /// An integer of at least `at_least`.
  void integer(const char* key, std::int64_t& value, std::int64_t at_least);
  /// One of `choices`.
  void text(const char* key, std::string& value, const std::vector<std::string>& choices);
  /// Finite numbers, one for each parameter group.
  void numbers(const char* key, std::vector<double>& values);
  /// The same, but a state without it leaves `values` as they are.
  void optional_numbers(const char* key, std::vector<double>& values);
  /// Something that the optimizer or the constructor decides: the state must hold the same.
  void same(const char* key, bool value);
  /// Something that Python's state has and C++ does not read.
  void constant(const char* key, const c10::IValue& value);
  /// The states of other schedulers.
  void schedulers(const char* key, const std::vector<std::shared_ptr<LRScheduler>>& values);
  /// Any other entry. `read` throws for a wrong value, with the text that it is given in front;
  /// it assigns only if its last argument is true.
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
