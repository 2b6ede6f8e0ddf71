// SPDX-License-Identifier: BSD-3-Clause
// The parts of the reducer around a backward: forming buckets, and parameters without gradients.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include "api/parallel/reducer.h"

namespace torchfuse::parallel {

void Reducer::form_buckets(const std::vector<std::size_t>& order) {
  const at::NoGradGuard no_grad;
  buckets_.clear();
  for (auto& members : plan_buckets(parameters_, order, sizes_)) {
    BucketMemory memory = allocate_bucket(parameters_, members);
    for (std::size_t place = 0; place < members.size(); ++place) {
      TrackedGrad& tracked = tracked_[members[place]];
      at::Tensor& grad = parameters_[members[place]].mutable_grad();
      const at::Tensor before = std::exchange(tracked.view, memory.views[place]);
      tracked.bucket = buckets_.size();
      // A gradient that lies in the old bucket moves along.
      if (!before.defined() || !grad.defined() || !grad.is_alias_of(before)) continue;
      tracked.view.copy_(grad);
      grad = tracked.view;
    }
    Bucket& bucket = buckets_.emplace_back();
    bucket.flat = std::move(memory.flat);
    bucket.averages = collectives_.averages(bucket.flat.device());
    bucket.members = std::move(members);
  }
}

void Reducer::rebuild_buckets() {
  std::vector<std::int64_t> order(observed_order_.begin(), observed_order_.end());
  const c10::Device device = parameters_.front().device();
  const at::Tensor shared = at::tensor(order, at::kLong).to(device);
  collectives_.broadcast(shared, "the broadcast of the order of gradients");
  const at::Tensor agreed = shared.cpu();
  const auto* first = agreed.const_data_ptr<std::int64_t>();
  form_buckets({first, first + agreed.numel()});
  observed_order_.clear();
}

std::vector<std::vector<std::string>> Reducer::bucket_names() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::vector<std::string>> names;
  for (const Bucket& bucket : buckets_) {
    auto& of_bucket = names.emplace_back();
    for (const std::size_t member : bucket.members) of_bucket.push_back(tracked_[member].name);
  }
  return names;
}

std::string Reducer::names_of(const std::vector<std::size_t>& indices) const {
  constexpr std::size_t kShown = 5;
  std::vector<std::string> names;
  for (const std::size_t index : indices) {
    if (names.size() < kShown) names.push_back("'" + tracked_[index].name + "'");
  }
  const std::string list = c10::Join(", ", names);
  return indices.size() <= kShown ? list : c10::str(list, ", ... ", indices.size(), " in all");
}

std::vector<std::size_t> Reducer::unreached() const {
  std::vector<std::size_t> missing;
  for (std::size_t index = 0; index < tracked_.size(); ++index) {
    if (!tracked_[index].ready) missing.push_back(index);
  }
  return missing;
}

void Reducer::fail_for_unreached(const std::vector<std::size_t>& missing) {
  // Others wait for the reductions that this rank began.
  wait_for_buckets();
  discard_parts();
  TORCH_CHECK(false, collectives_.who(),
              ": expected backward() to give each parameter a gradient, got none for ",
              missing.size(), " of ", tracked_.size(), " parameters: ", names_of(missing),
              ". Let the loss depend on all, freeze them, or set find_unused_parameters.");
}

/// This rank's part of the average for a parameter that it did not reach: zero, or what no_sync
/// left.
void Reducer::fill_in(std::size_t index) {
  const at::NoGradGuard no_grad;
  TrackedGrad& tracked = tracked_[index];
  const at::Tensor grad = parameters_[index].grad();
  // A program may have dropped what no_sync left, and parts take what it has set itself.
  tracked.used = grad.defined() && (tracked.used || parts_ != nullptr);
  if (parts_ != nullptr) {
    if (grad.defined()) {
      bring_gradient(index);
    } else {
      open_bucket(buckets_[tracked.bucket]);
    }
  } else if (grad.defined()) {
    tracked.kept = grad.is_alias_of(tracked.view) ? grad.clone() : grad;
    bring_gradient(index);
  } else {
    tracked.view.zero_();
  }
  mark_ready(index);
}

/// How many ranks used each parameter, on the parameters' device; a collective.
at::Tensor Reducer::ranks_that_used() const {
  at::Tensor used = at::zeros({static_cast<std::int64_t>(tracked_.size())}, at::kInt);
  auto* flags = used.mutable_data_ptr<std::int32_t>();
  for (std::size_t index = 0; index < tracked_.size(); ++index) flags[index] = tracked_[index].used;
  used = used.to(parameters_.front().device());
  collectives_.sum(used, "the comparison of unused parameters");
  return used;
}

/// A parameter that any rank used gets the average, all others keep what they had.
void Reducer::settle_unreached(const std::vector<std::size_t>& missing) {
  const at::NoGradGuard no_grad;
  const at::Tensor all = find_unused_ ? ranks_that_used() : at::Tensor();
  if (parts_ != nullptr) return hand_over_parts(all);
  // Only a rank that did not reach a parameter has to know: nothing is read back otherwise.
  if (missing.empty()) return;
  const at::Tensor used = all.cpu();
  const auto* ranks = used.const_data_ptr<std::int32_t>();
  for (const std::size_t index : missing) {
    TrackedGrad& tracked = tracked_[index];
    at::Tensor& grad = parameters_[index].mutable_grad();
    const at::Tensor kept = std::exchange(tracked.kept, at::Tensor());
    if (ranks[index] > 0) {
      grad = tracked.view;
    } else if (kept.defined()) {
      grad = tracked.view.copy_(kept);
    }
  }
}

}  // namespace torchfuse::parallel
