// SPDX-License-Identifier: BSD-3-Clause
#include "api/parallel/gathers.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <mutex>
#include <utility>

#include "api/parallel/buckets.h"
#include "api/parallel/rendezvous.h"

namespace torchfuse::parallel {

namespace {

constexpr const char* kGather = "the gather of what each has updated";

struct Remembered {
  std::mutex mutex;
  std::vector<std::weak_ptr<Gathers>> gathers;
};

Remembered& remembered() {
  static Remembered all;
  return all;
}

bool contains(const std::vector<std::size_t>& numbers, std::size_t number) {
  return std::find(numbers.begin(), numbers.end(), number) != numbers.end();
}

}  // namespace

std::vector<std::vector<std::size_t>> plan_units(const std::vector<at::Tensor>& params,
                                                 const std::vector<GatherUnit>& units) {
  constexpr auto kAll = std::numeric_limits<std::int64_t>::max();
  std::vector<bool> taken(params.size(), false);
  std::vector<std::vector<std::size_t>> flats;
  const auto add = [&](const std::vector<std::size_t>& members) {
    std::vector<std::size_t> left;
    for (const std::size_t index : members) {
      if (!taken[index]) left.push_back(index);
      taken[index] = true;
    }
    for (auto& of_kind : plan_buckets(params, left, {kAll, kAll})) {
      flats.push_back(std::move(of_kind));
    }
  };
  for (const GatherUnit& unit : units) add(unit.members);
  std::vector<std::size_t> all;
  for (const std::size_t index : c10::irange(params.size())) all.push_back(index);
  add(all);
  return flats;
}

Gathers::Gathers(Collectives collectives, const Partition& partition,
                 const std::vector<at::Tensor>& flats, std::vector<GatherUnit> units)
    : collectives_(std::move(collectives)) {
  std::vector<bool> covered(partition.places().size(), false);
  for (const GatherUnit& unit : units) {
    for (const std::size_t index : unit.members) covered[index] = true;
  }
  std::vector<bool> waits(flats.size(), true);
  for (const std::size_t index : c10::irange(covered.size())) {
    if (!covered[index]) waits[partition.places()[index].flat] = false;
  }
  for (const std::size_t flat : c10::irange(flats.size())) {
    const std::int64_t part = partition.flats()[flat].part;
    flats_.push_back({flats[flat], flats[flat].narrow(0, partition.first_of(flat), part), {}, {}});
    if (!waits[flat]) early_.push_back(flat);
  }
  for (const GatherUnit& unit : units) {
    Waiting waiting{unit.module, {}};
    for (const std::size_t index : unit.members) {
      const std::size_t flat = partition.places()[index].flat;
      if (!waits[flat] || contains(waiting.flats, flat)) continue;
      waiting.flats.push_back(flat);
      if (!contains(late_, flat)) late_.push_back(flat);
    }
    units_.push_back(std::move(waiting));
  }
}

void Gathers::leave() noexcept {
  if (std::exchange(left_, true)) return;
  const char* const mixed = ": the model has parameters of different steps: ";
  try {
    // An error on its way up may be that other ranks are gone.
    const bool unwinding = std::uncaught_exceptions() > exceptions_;
    if (!unwinding) return finish();
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!is_complete()) {
      TORCH_WARN(collectives_.who(), mixed, kGather, " was under way when an exception ended it.");
    }
  } catch (const std::exception& error) {
    try {
      TORCH_WARN(collectives_.who(), mixed, message_of(error));
    } catch (const std::exception&) {  // a program that makes errors of warnings
    }
  }
}

void Gathers::run() {
  const at::NoGradGuard no_grad;
  const std::lock_guard<std::mutex> lock(mutex_);
  finish(early_);
  finish(late_);
  if (collectives_.size() == 1) return;
  for (const auto* order : {&early_, &late_}) {
    for (const std::size_t index : *order) {
      Flat& flat = flats_[index];
      flat.pending = collectives_.start_all_gather(flat.whole, flat.own, kGather);
    }
  }
  for (Waiting& unit : units_) {
    if (!std::exchange(unit.called, false)) finish(unit.flats);
  }
  finish(early_);
}

void Gathers::finish() {
  const std::lock_guard<std::mutex> lock(mutex_);
  finish(early_);
  finish(late_);
}

void Gathers::finish(const torch::nn::Module& module) {
  const std::lock_guard<std::mutex> lock(mutex_);
  bool known = false;
  for (Waiting& unit : units_) {
    if (unit.module.lock().get() != &module) continue;
    known = unit.called = true;
    finish(unit.flats);
  }
  TORCH_CHECK_VALUE(known, collectives_.who(),
                    "::finish_gather: expected a module of gather_in_forward, got a ",
                    module.name(), " that is none of its ", units_.size(),
                    ". List it when the optimizer is made.");
}

void Gathers::finish(const std::vector<std::size_t>& flats) {
  for (const std::size_t flat : flats) finish(flats_[flat]);
}

void Gathers::finish(Flat& flat) {
  TORCH_CHECK(flat.failure.empty(), flat.failure);
  // On a GPU a stream waits, and another one may have to wait again.
  Pending pending = flat.whole.is_cpu() ? std::exchange(flat.pending, {}) : flat.pending;
  try {
    collectives_.wait(pending);
  } catch (const std::exception& error) {
    flat.failure = message_of(error);
    throw;
  }
}

bool Gathers::is_complete() const {
  return std::all_of(flats_.begin(), flats_.end(), [](const Flat& flat) {
    return flat.failure.empty() &&
           std::all_of(flat.pending.works.begin(), flat.pending.works.end(),
                       [](const auto& work) { return !work || work->isCompleted(); });
  });
}

bool Gathers::has(const std::vector<at::Tensor>& tensors) const {
  return std::any_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    return tensor.has_storage() && std::any_of(flats_.begin(), flats_.end(), [&](const Flat& flat) {
             return tensor.is_alias_of(flat.whole);
           });
  });
}

void remember(const std::shared_ptr<Gathers>& gathers) {
  Remembered& all = remembered();
  const std::lock_guard<std::mutex> lock(all.mutex);
  std::erase_if(all.gathers, [](const auto& each) { return each.expired(); });
  all.gathers.push_back(gathers);
}

void finish_gathers_of(const std::vector<at::Tensor>& tensors) {
  Remembered& all = remembered();
  std::vector<std::shared_ptr<Gathers>> found;
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    for (const auto& each : all.gathers) {
      if (auto gathers = each.lock()) found.push_back(std::move(gathers));
    }
  }
  // Without the lock: other threads may be ranks that this one waits for.
  std::erase_if(found, [&](const auto& gathers) { return !gathers->has(tensors); });
  for (const auto& gathers : found) gathers->finish();
}

}  // namespace torchfuse::parallel
