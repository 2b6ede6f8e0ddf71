// SPDX-License-Identifier: BSD-3-Clause
// LRSchedulerFields, and the state of LRScheduler.
#include <torchfuse/optim/lr_scheduler/state.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torchfuse/optim/lr_scheduler.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "api/optim/lr_scheduler/state_values.h"

namespace torchfuse::optim {

void LRSchedulerFields::entry(
    const char* key, const c10::IValue& written,
    const std::function<void(const c10::IValue&, const std::string&, bool)>& read) {
  if (task_ == Task::kWrite) {
    state_[key] = written;
    return;
  }
  const auto found = state_.find(key);
  TORCH_CHECK_VALUE(found != state_.end(), owner_, ": expected the state to hold '", key,
                    "', got none. Load a state that the same class saved.");
  const std::string expected = owner_ + ": expected the state's " + key;
  read(found->second, expected, task_ == Task::kRead);
}

void LRSchedulerFields::number(const char* key, double& value, const char* range,
                               bool (*valid)(double)) {
  entry(key, value, [&](const c10::IValue& saved, const std::string& expected, bool assign) {
    const std::optional<double> number = to_number(saved);
    TORCH_CHECK_VALUE(number && valid(*number), expected, " to be ", range, ", got ", shown(saved),
                      ".");
    if (assign) value = *number;
  });
}

void LRSchedulerFields::rate(const char* key, double& value) {
  number(key, value, kRateRange, &is_rate);
}

void LRSchedulerFields::integer(const char* key, std::int64_t& value, std::int64_t at_least) {
  entry(key, value, [&](const c10::IValue& saved, const std::string& expected, bool assign) {
    TORCH_CHECK_VALUE(saved.isInt() && saved.toInt() >= at_least, expected,
                      " to be an integer of at least ", at_least, ", got ", shown(saved), ".");
    if (assign) value = saved.toInt();
  });
}

void LRSchedulerFields::text(const char* key, std::string& value,
                             const std::vector<std::string>& choices) {
  entry(key, value, [&](const c10::IValue& saved, const std::string& expected, bool assign) {
    const bool known = saved.isString() && std::find(choices.begin(), choices.end(),
                                                     saved.toStringRef()) != choices.end();
    TORCH_CHECK_VALUE(known, expected, " to be one of ", c10::Join(", ", choices), ", got ",
                      shown(saved), ".");
    if (assign) value = saved.toStringRef();
  });
}

void LRSchedulerFields::numbers(const char* key, std::vector<double>& values) {
  entry(key, values, [&](const c10::IValue& saved, const std::string& expected, bool assign) {
    std::vector<double> read;
    const std::optional<std::vector<c10::IValue>> elements = to_elements(saved);
    TORCH_CHECK_VALUE(elements && elements->size() == groups_, expected, " to be ", groups_,
                      " numbers, one per parameter group, got ", shown(saved),
                      ". Load the state with an optimizer that has as many groups.");
    for (const c10::IValue& element : *elements) {
      const std::optional<double> number = to_number(element);
      TORCH_CHECK_VALUE(number && std::isfinite(*number), expected, " to be finite numbers, got ",
                        shown(element), ".");
      read.push_back(*number);
    }
    if (assign) values = std::move(read);
  });
}

void LRSchedulerFields::optional_numbers(const char* key, std::vector<double>& values) {
  if (task_ == Task::kWrite || state_.contains(key)) numbers(key, values);
}

void LRSchedulerFields::same(const char* key, bool value) {
  entry(key, value, [&](const c10::IValue& saved, const std::string& expected, bool) {
    TORCH_CHECK_VALUE(saved.isBool() && saved.toBool() == value, expected, " to be ",
                      value ? "true" : "false", " as in this scheduler, got ", shown(saved),
                      ". Construct the scheduler with the saved scheduler's options.");
  });
}

void LRSchedulerFields::constant(const char* key, const c10::IValue& value) {
  if (task_ == Task::kWrite) state_[key] = value;
}

void LRSchedulerFields::schedulers(const char* key,
                                   const std::vector<std::shared_ptr<LRScheduler>>& values) {
  std::vector<LRSchedulerState> written;
  if (task_ == Task::kWrite) {
    for (const auto& scheduler : values) written.push_back(scheduler->state_dict());
  }
  entry(key, to_ivalue(written),
        [&](const c10::IValue& saved, const std::string& expected, bool assign) {
          const std::optional<std::vector<LRSchedulerState>> states = to_states(saved);
          TORCH_CHECK_VALUE(states && states->size() == values.size(), expected, " to be ",
                            values.size(), " states, one per inner scheduler, got ", shown(saved),
                            ".");
          for (std::size_t i = 0; i < values.size(); ++i) {
            const std::string owner =
                owner_ + ": " + key + "[" + std::to_string(i) + "], " + values[i]->name();
            values[i]->read_state((*states)[i], owner, assign);
          }
        });
}

// --- LRScheduler ---------------------------------------------------------------------------------

void LRScheduler::visit_state(LRSchedulerFields& fields) {
  fields.numbers("base_lrs", base_lrs_);
  fields.integer("last_epoch", last_epoch_, -1);
  fields.integer("_step_count", step_count_, 0);
  fields.numbers("_last_lr", last_lr_);
}

LRSchedulerState LRScheduler::state_dict() const {
  LRSchedulerFields fields(LRSchedulerFields::Task::kWrite, name_, LRSchedulerState(),
                           last_lr_.size());
  // visit_state() is not const, because it also loads states. Here it only reads the members.
  const_cast<LRScheduler*>(this)->visit_state(fields);
  return fields.state_;
}

void LRScheduler::read_state(const LRSchedulerState& state, const std::string& owner, bool assign) {
  using Task = LRSchedulerFields::Task;
  LRSchedulerFields fields(assign ? Task::kRead : Task::kCheck, owner, state, last_lr_.size());
  visit_state(fields);
}

void LRScheduler::load_state_dict(const LRSchedulerState& state) {
  const std::string owner = std::string(name_) + ".load_state_dict";
  read_state(state, owner, /*assign=*/false);
  read_state(state, owner, /*assign=*/true);
}

std::string LRScheduler::signature() const {
  std::vector<std::string> inner;
  for (const auto& scheduler : schedulers()) inner.push_back(scheduler->signature());
  return inner.empty() ? name_ : std::string(name_) + "(" + c10::Join(", ", inner) + ")";
}

void LRScheduler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("format", c10::IValue(kSchedulerFormat));
  archive.write("scheduler", c10::IValue(signature()));
  write_nested(archive, "state", state_dict());
}

void LRScheduler::load(torch::serialize::InputArchive& archive) {
  const std::string owner = std::string(name_) + ".load";
  const auto check = [&](const char* key, const std::string& expected) {
    c10::IValue value;
    TORCH_CHECK_VALUE(archive.try_read(key, value), owner, ": expected the archive to hold ", key,
                      ", got none. Load an archive that torch::save wrote for a scheduler.");
    TORCH_CHECK_VALUE(value.isString() && value.toStringRef() == expected, owner,
                      ": expected the archive's ", key, " to be ", expected, ", got ", shown(value),
                      ". Load an archive that torch::save wrote for this class.");
  };
  check("format", kSchedulerFormat);
  check("scheduler", signature());
  const LRSchedulerState state = read_nested(archive, owner, "state");
  read_state(state, owner, /*assign=*/false);
  read_state(state, owner, /*assign=*/true);
}

}  // namespace torchfuse::optim
