// SPDX-License-Identifier: BSD-3-Clause
#include "api/parallel/reducer.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <numeric>

namespace torchfuse::parallel {

bool Reducer::Form::fits(const at::Tensor& tensor) const {
  return tensor.scalar_type() == dtype && tensor.device() == device && tensor.sizes() == sizes;
}

std::string Reducer::Form::described() const {
  return c10::str(dtype, " ", at::IntArrayRef(sizes), " on ", device);
}

/// Runs after a parameter's gradient was accumulated.
class Reducer::Hook : public torch::autograd::FunctionPostHook {
 public:
  Hook(Reducer& reducer, std::size_t index) : reducer_(reducer), index_(index) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list& inputs) override {
    reducer_.on_gradient(index_, !inputs.empty() && inputs[0].defined());
    return outputs;
  }

 private:
  Reducer& reducer_;  ///< removes the hook before it ends
  std::size_t index_;
};

Reducer::Reducer(NamedTensors parameters, Collectives collectives,
                 const DistributedDataParallelOptions& options,
                 std::shared_ptr<GradientParts> parts)
    : collectives_(std::move(collectives)),
      sizes_{options.first_bucket_bytes(), options.bucket_bytes()},
      find_unused_(options.find_unused_parameters()),
      parts_(std::move(parts)) {
  for (auto& [name, parameter] : parameters) {
    parameters_.push_back(parameter);
    tracked_.push_back(
        {std::move(name), {parameter.scalar_type(), parameter.device(), parameter.sizes().vec()}});
  }
  if (parts_ != nullptr) {
    form_buckets_of_parts();
    return;
  }
  // Backward reaches the last layers first.
  std::vector<std::size_t> order(parameters_.size());
  std::iota(order.rbegin(), order.rend(), std::size_t{0});
  form_buckets(order);
}

Reducer::~Reducer() {
  for (TrackedGrad& tracked : tracked_) {
    if (tracked.accumulator) tracked.accumulator->del_post_hook(tracked.hook);
  }
}

NamedTensors Reducer::parameters() const {
  NamedTensors named;
  for (std::size_t index = 0; index < tracked_.size(); ++index) {
    named.emplace_back(tracked_[index].name, parameters_[index]);
  }
  return named;
}

void Reducer::install_hooks() {
  for (std::size_t index = 0; index < tracked_.size(); ++index) install_hook(index);
}

void Reducer::install_hook(std::size_t index) {
  TrackedGrad& tracked = tracked_[index];
  if (tracked.accumulator) tracked.accumulator->del_post_hook(tracked.hook);
  tracked.accumulator = torch::autograd::impl::grad_accumulator(parameters_[index]);
  tracked.hook = tracked.accumulator->add_post_hook(std::make_unique<Hook>(*this, index));
}

void Reducer::before_forward(bool sync) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(phase_ != Phase::kBackward, collectives_.who(),
              ": expected the last backward() to reach its end, got a forward() after one that "
              "ended early, by an exception. Other ranks may be in another step: start again from "
              "a checkpoint.");
  TORCH_CHECK(parts_ == nullptr || parts_.use_count() > 1, collectives_.who(),
              ": expected the ShardedOptimizer that this model's gradients are split for, got one "
              "that has been destroyed: nobody would use them. Make another with the model.");
  check_parameters();
  if (!sync) {
    phase_ = Phase::kLocal;
    return;
  }
  if (!observed_order_.empty()) rebuild_buckets();
  phase_ = Phase::kForwarded;
  awaits_backward_ = true;
}

void Reducer::set_sync(bool sync) {
  check_ended();
  const std::lock_guard lock(mutex_);
  phase_ = between_ = sync ? Phase::kForwarded : Phase::kLocal;
}

void Reducer::check_ended() const {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(phase_ != Phase::kBackward, collectives_.who(),
              ": expected the last backward() to reach its end, got one that ended early, by an "
              "exception. Other ranks may be in another step: start again from a checkpoint.");
}

bool Reducer::awaits_backward() const {
  const std::lock_guard lock(mutex_);
  return awaits_backward_;
}

void Reducer::on_gradient(std::size_t index, bool defined) {
  const std::lock_guard lock(mutex_);
  if (!defined) return;
  TrackedGrad& tracked = tracked_[index];
  if (phase_ == Phase::kLocal) {
    tracked.used = true;
    return;
  }
  TORCH_CHECK(phase_ != Phase::kIdle, collectives_.who(),
              ": expected a forward() before each backward(), got a gradient of '", tracked.name,
              "' without one. Call forward() of DistributedDataParallel, not of the module; add up "
              "losses that share a forward().");
  if (phase_ == Phase::kForwarded) begin_backward();
  TORCH_CHECK(
      between_ == Phase::kIdle || graph_task_ == torch::autograd::get_current_graph_task_id(),
      collectives_.who(),
      ": expected one backward() to reach its end before another gives gradients, got '",
      tracked.name,
      "' in another. If an exception ended the last backward(), other ranks "
      "may be in another step: start again from a checkpoint. Do not call backward() "
      "within backward(), as checkpointing of activations does with use_reentrant=True.");
  TORCH_CHECK(!tracked.ready, collectives_.who(),
              ": expected backward() to reach each parameter once, got '", tracked.name,
              "' twice. Do not call backward() within backward(), as some ways of "
              "checkpointing activations do.");
  tracked.used = true;
  bring_gradient(index);
  mark_ready(index);
  arrived_.push_back(index);
  launch_complete_buckets();
}

void Reducer::begin_backward() {
  for (TrackedGrad& tracked : tracked_) tracked.ready = false;
  discard_parts();
  if (parts_ != nullptr) parts_->set_under_way(true);
  for (Bucket& bucket : buckets_) bucket.missing = bucket.members.size();
  next_ = 0;
  arrived_.clear();
  phase_ = Phase::kBackward;
  graph_task_ = torch::autograd::get_current_graph_task_id();
  awaits_backward_ = false;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [self = shared_from_this()] { self->finish(); });
}

void Reducer::mark_ready(std::size_t index) {
  tracked_[index].ready = true;
  --buckets_[tracked_[index].bucket].missing;
}

void Reducer::launch_complete_buckets() {
  for (; next_ < buckets_.size() && buckets_[next_].missing == 0; ++next_) {
    Bucket& bucket = buckets_[next_];
    std::string what = c10::str("the reduction of gradients ", next_ + 1, " of ", buckets_.size(),
                                " (", names_of(bucket.members), ")");
    if (parts_ != nullptr) {
      start_parts(next_, std::move(what));
      continue;
    }
    bucket.pending = collectives_.start_all_reduce(
        bucket.flat, bucket.averages ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM, std::move(what));
  }
}

void Reducer::wait_for_buckets() {
  for (std::size_t index = 0; index < next_; ++index) {
    if (parts_ != nullptr) {
      finish_parts(buckets_[index]);
    } else {
      collectives_.wait(buckets_[index].pending);
    }
  }
}

void Reducer::bring_gradient(std::size_t index) {
  const at::NoGradGuard no_grad;
  TrackedGrad& tracked = tracked_[index];
  at::Tensor& grad = parameters_[index].mutable_grad();
  TORCH_CHECK(grad.defined(), collectives_.who(), ": expected to reduce the gradient of '",
              tracked.name,
              "' alone, got none: another optimizer has taken it. Drop the other "
              "one before this one is made.");
  check_gradient(index, grad);
  if (parts_ != nullptr) return bring_to_parts(index);
  const bool in_place = grad.is_alias_of(tracked.view) &&
                        grad.strides() == tracked.view.strides() &&
                        grad.storage_offset() == tracked.view.storage_offset();
  const double factor =
      buckets_[tracked.bucket].averages ? 1.0 : 1.0 / static_cast<double>(collectives_.size());
  if (!in_place) {
    at::mul_out(tracked.view, grad, at::scalar_tensor(factor, at::kDouble));
    grad = tracked.view;
  } else if (factor != 1.0) {
    tracked.view.mul_(factor);
  }
}

void Reducer::check_gradient(std::size_t index, const at::Tensor& grad) const {
  const Form& form = tracked_[index].form;
  TORCH_CHECK_VALUE(grad.layout() == at::kStrided && form.fits(grad), collectives_.who(),
                    ": expected the gradient of '", tracked_[index].name,
                    "' to be dense and as its parameter, ", form.described(), ", got layout ",
                    grad.layout(), ", ", grad.scalar_type(), " ", grad.sizes(), " on ",
                    grad.device(), ". Use layers with dense gradients.");
}

// A parameter that is converted or moved loses its accumulator, and so our hook: its gradients
// would stay local without a word.
void Reducer::check_parameters() {
  for (std::size_t index = 0; index < tracked_.size(); ++index) {
    const TrackedGrad& tracked = tracked_[index];
    const at::Tensor& parameter = parameters_[index];
    if (torch::autograd::impl::try_get_grad_accumulator(parameter) == tracked.accumulator) continue;
    // Other memory behind the parameter, as torch::load gives it: the hook went with the old.
    TORCH_CHECK_VALUE(tracked.form.fits(parameter), collectives_.who(), ": expected parameter '",
                      tracked.name, "' to stay as it was given, ", tracked.form.described(),
                      ", got ", parameter.scalar_type(), " ", parameter.sizes(), " on ",
                      parameter.device(),
                      ". Convert and move the module before it is given to "
                      "DistributedDataParallel.");
    install_hook(index);
  }
}

void Reducer::finish() {
  const std::lock_guard lock(mutex_);
  phase_ = between_;
  const std::vector<std::size_t> missing = unreached();
  if (!missing.empty() && !find_unused_) fail_for_unreached(missing);
  for (const std::size_t index : missing) fill_in(index);
  launch_complete_buckets();
  wait_for_buckets();
  if (find_unused_ || parts_ != nullptr) settle_unreached(missing);
  for (TrackedGrad& tracked : tracked_) tracked.used = false;
  if (reordered_) return;
  // Formed anew before the next forward: gradients of this backward stay where they are until then.
  reordered_ = true;
  observed_order_ = arrived_;
  observed_order_.insert(observed_order_.end(), missing.begin(), missing.end());
}

}  // namespace torchfuse::parallel
