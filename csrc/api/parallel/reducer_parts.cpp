// SPDX-License-Identifier: BSD-3-Clause
// Gradients of which each rank keeps a part: see Note [Parts of gradients] in reducer.h.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <map>
#include <utility>

#include "api/parallel/reducer.h"

namespace torchfuse::parallel {

namespace {

/// Buckets that are reduced while later ones are filled.
constexpr std::size_t kUnderWay = 2;

}  // namespace

void Reducer::form_buckets_of_parts() {
  std::map<const void*, std::size_t> parts;
  for (std::size_t part = 0; part < parts_->params().size(); ++part) {
    parts.emplace(parts_->params()[part].unsafeGetTensorImpl(), part);
  }
  std::map<std::size_t, std::vector<std::size_t>> members;
  for (std::size_t index = 0; index < parameters_.size(); ++index) {
    tracked_[index].part = parts.at(parameters_[index].unsafeGetTensorImpl());
    members[parts_->partition().places()[tracked_[index].part].flat].push_back(index);
  }
  for (auto& [flat, of_flat] : members) {
    for (const std::size_t index : of_flat) tracked_[index].bucket = buckets_.size();
    Bucket& bucket = buckets_.emplace_back();
    bucket.of_parts = flat;
    bucket.averages = collectives_.averages(parts_->partition().flats()[flat].options.device());
    bucket.members = std::move(of_flat);
  }
  // The parts are where they are.
  reordered_ = true;
}

void Reducer::open_bucket(Bucket& bucket) {
  if (bucket.flat.defined()) return;
  const Partition& partition = parts_->partition();
  const FlatPlan& plan = partition.flats()[bucket.of_parts];
  // Elements without a gradient count as zero.
  bucket.flat = at::zeros({plan.numel}, plan.options);
  for (const std::size_t index : bucket.members) {
    TrackedGrad& tracked = tracked_[index];
    tracked.view = partition.view_of(tracked.part, bucket.flat, parameters_[index]);
  }
}

void Reducer::bring_to_parts(std::size_t index) {
  Bucket& bucket = buckets_[tracked_[index].bucket];
  open_bucket(bucket);
  at::Tensor& grad = parameters_[index].mutable_grad();
  const double factor = bucket.averages ? 1.0 : 1.0 / static_cast<double>(collectives_.size());
  at::mul_out(tracked_[index].view, grad, at::scalar_tensor(factor, at::kDouble));
  grad.reset();
}

void Reducer::start_parts(std::size_t index, std::string what) {
  Bucket& bucket = buckets_[index];
  bucket.pending_parts =
      collectives_.start_reduce_scatter(std::exchange(bucket.flat, at::Tensor()),
                                        bucket.averages ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM,
                                        static_cast<std::int64_t>(index), std::move(what));
  for (const std::size_t member : bucket.members) tracked_[member].view.reset();
  if (index >= kUnderWay) finish_parts(buckets_[index - kUnderWay]);
}

void Reducer::finish_parts(Bucket& bucket) {
  if (!bucket.own.defined()) bucket.own = collectives_.wait(bucket.pending_parts);
}

/// @param ranks_that_used each parameter; undefined: all did.
void Reducer::hand_over_parts(const at::Tensor& ranks_that_used) {
  const at::Tensor used = ranks_that_used.defined() ? ranks_that_used.cpu() : at::Tensor();
  for (std::size_t index = 0; index < tracked_.size(); ++index) {
    if (used.defined() && used.const_data_ptr<std::int32_t>()[index] == 0) continue;
    parts_->add(tracked_[index].part, buckets_[tracked_[index].bucket].own);
  }
  discard_parts();
}

void Reducer::discard_parts() {
  if (parts_ == nullptr) return;
  parts_->set_under_way(false);
  for (Bucket& bucket : buckets_) {
    bucket.flat.reset();
    bucket.own.reset();
    bucket.pending_parts = {};
  }
  for (TrackedGrad& tracked : tracked_) tracked.view.reset();
}

}  // namespace torchfuse::parallel
