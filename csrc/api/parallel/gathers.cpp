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

/// What was under way when an exception ended its optimizer. It holds no process group, which may
/// end before it.
struct LeftBehind {
  at::Tensor flat;
  Works works;
};

struct Remembered {
  std::mutex mutex;
  std::vector<std::weak_ptr<Gathers>> gathers;
  std::vector<LeftBehind> left_behind;
};

Remembered& remembered() {
  // Never destroyed: at the process's end, what was left behind may still be under way.
  static auto* const all = new Remembered;
  return *all;
}

bool has_alias_of(const std::vector<at::Tensor>& tensors, const at::Tensor& flat) {
  return std::any_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    return tensor.has_storage() && tensor.is_alias_of(flat);
  });
}

/// Waits for what was left behind in these tensors; its failure was warned of.
void settle_left_behind(const std::vector<at::Tensor>& tensors) {
  Remembered& all = remembered();
  std::vector<LeftBehind> found;
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    for (const LeftBehind& each : all.left_behind) {
      if (has_alias_of(tensors, each.flat)) found.push_back(each);
    }
  }
  // Without the lock: other threads may be ranks that this one waits for.
  for (const LeftBehind& each : found) first_error_of(each.works);
  const std::lock_guard<std::mutex> lock(all.mutex);
  // On a GPU a stream has waited, and another one may have to.
  std::erase_if(all.left_behind, [](const LeftBehind& each) { return have_ended(each.works); });
}

/// The gathers of optimizers that are there and have some of these tensors.
std::vector<std::shared_ptr<Gathers>> gathers_of(const std::vector<at::Tensor>& tensors) {
  Remembered& all = remembered();
  std::vector<std::shared_ptr<Gathers>> found;
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    for (const auto& each : all.gathers) {
      if (auto gathers = each.lock()) found.push_back(std::move(gathers));
    }
  }
  std::erase_if(found, [&](const auto& each) { return each->has_left() || !each->has(tensors); });
  return found;
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
  all_ = early_;
  for (const GatherUnit& unit : units) {
    Waiting waiting{unit.module, {}};
    for (const std::size_t index : unit.members) {
      const std::size_t flat = partition.places()[index].flat;
      if (!waits[flat] || contains(waiting.flats, flat)) continue;
      waiting.flats.push_back(flat);
      if (!contains(all_, flat)) all_.push_back(flat);
    }
    units_.push_back(std::move(waiting));
  }
}

void Gathers::leave() noexcept {
  if (left_.exchange(true)) return;
  const char* const mixed = ": the model has parameters of different steps: ";
  try {
    // An error on its way up may be that other ranks are gone.
    const bool unwinding = std::uncaught_exceptions() > exceptions_;
    if (!unwinding) return finish();
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_complete()) return;
    leave_behind();
    TORCH_WARN(collectives_.who(), mixed, kGather, " was under way when an exception ended it.");
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
  if (collectives_.size() == 1) return;
  start_all();
  for (Waiting& unit : units_) {
    if (!std::exchange(unit.called, false)) finish(unit.flats);
  }
  finish(early_);
}

void Gathers::start_all() {
  std::string failure;
  for (const std::size_t index : all_) {
    Flat& flat = flats_[index];
    try {
      if (failure.empty()) {
        flat.pending = collectives_.start_all_gather(flat.whole, flat.own, kGather);
      }
    } catch (const std::exception& error) {
      failure = message_of(error);
    }
    // Those after it are not begun: other ranks may take one gather for another.
    flat.failure = failure;
  }
  if (!failure.empty()) finish(all_);
}

void Gathers::finish() {
  const std::lock_guard<std::mutex> lock(mutex_);
  finish(all_);
}

void Gathers::finish(const torch::nn::Module& module) {
  const std::lock_guard<std::mutex> lock(mutex_);
  bool known = false;
  for (Waiting& unit : units_) {
    if (unit.module.lock().get() != &module) continue;
    known = unit.called = true;
    finish(unit.flats);
  }
  const auto is_copy = [&] {
    const auto params = module.parameters();
    return !params.empty() && !has(params);
  };
  TORCH_CHECK_VALUE(known || is_copy(), collectives_.who(),
                    "::finish_gather: expected a module of gather_in_forward, got a ",
                    module.name(), " that is none of its ", units_.size(),
                    ". List it when the optimizer is made.");
}

void Gathers::finish(const std::vector<std::size_t>& flats) {
  settle(flats);
  for (const std::size_t flat : flats) {
    TORCH_CHECK(flats_[flat].failure.empty(), flats_[flat].failure);
  }
}

void Gathers::settle() {
  const std::lock_guard<std::mutex> lock(mutex_);
  settle(all_);
}

void Gathers::settle(const std::vector<std::size_t>& flats) {
  for (const std::size_t index : flats) {
    Flat& flat = flats_[index];
    // On a GPU a stream waits, and another one may have to wait again.
    Pending pending = flat.whole.is_cpu() ? std::exchange(flat.pending, {}) : flat.pending;
    try {
      collectives_.wait(pending);
    } catch (const std::exception& error) {
      flat.failure = message_of(error);
    }
  }
}

bool Gathers::is_complete() const {
  return std::all_of(flats_.begin(), flats_.end(), [](const Flat& flat) {
    return flat.failure.empty() && have_ended(flat.pending.works) &&
           std::none_of(flat.pending.works.begin(), flat.pending.works.end(),
                        [](const auto& work) { return work && work->exception() != nullptr; });
  });
}

void Gathers::leave_behind() {
  Remembered& all = remembered();
  const std::lock_guard<std::mutex> lock(all.mutex);
  for (Flat& flat : flats_) {
    Pending pending = std::exchange(flat.pending, {});
    if (have_ended(pending.works)) continue;
    all.left_behind.push_back({flat.whole, std::move(pending.works)});
  }
}

bool Gathers::has(const std::vector<at::Tensor>& tensors) const {
  return std::any_of(flats_.begin(), flats_.end(),
                     [&](const Flat& flat) { return has_alias_of(tensors, flat.whole); });
}

void remember(const std::shared_ptr<Gathers>& gathers) {
  Remembered& all = remembered();
  const std::lock_guard<std::mutex> lock(all.mutex);
  std::erase_if(all.gathers, [](const auto& each) { return each.expired(); });
  std::erase_if(all.left_behind, [](const LeftBehind& each) { return have_ended(each.works); });
  all.gathers.push_back(gathers);
}

void finish_gathers_of(const std::vector<at::Tensor>& tensors) {
  settle_left_behind(tensors);
  for (const auto& gathers : gathers_of(tensors)) gathers->finish();
}

void settle_gathers_of(const std::vector<at::Tensor>& tensors) {
  settle_left_behind(tensors);
  for (const auto& gathers : gathers_of(tensors)) gathers->settle();
}

}  // namespace torchfuse::parallel
