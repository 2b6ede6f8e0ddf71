// SPDX-License-Identifier: BSD-3-Clause
#include "api/parallel/reducer.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <numeric>

namespace torchfuse::parallel {

bool Reducer::Form::fits(const at::Tensor& tensor) const {
  return tensor.scalar_type() == dtype && tensor.device() == device && tensor.sizes() == sizes;
}

std::string Reducer::Form::described() const {
  return c10::str(dtype, " ", at::IntArrayRef(sizes), " on ", device);
}

/// Runs after a parameter's gradient has been accumulated.
class Reducer::Hook : public torch::autograd::FunctionPostHook {
 public:
  Hook(Reducer& reducer, std::size_t index) : reducer_(reducer), index_(index) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list& inputs) override {
    reducer_.on_gradient(index_, !inputs.empty() && inputs[0].defined());
    return outputs;
  }

 private:
  Reducer& reducer_;  ///< outlives the hook, which its destructor removes
  std::size_t index_;
};

Reducer::Reducer(NamedTensors parameters, Collectives collectives,
                 const DistributedDataParallelOptions& options)
    : collectives_(std::move(collectives)),
      sizes_{options.first_bucket_bytes(), options.bucket_bytes()},
      find_unused_(options.find_unused_parameters()) {
  for (auto& [name, parameter] : parameters) {
    parameters_.push_back(parameter);
    tracked_.push_back(
        {std::move(name), {parameter.scalar_type(), parameter.device(), parameter.sizes().vec()}});
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
              ": forward() was called after an exception ended the last backward(). Other ranks "
              "may be in another step. Restart all ranks from a checkpoint.");
  check_parameters();
  if (!sync) {
    phase_ = Phase::kLocal;
    return;
  }
  if (!observed_order_.empty()) rebuild_buckets();
  phase_ = Phase::kForwarded;
  awaits_backward_ = true;
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
  TORCH_CHECK(
      phase_ != Phase::kIdle, collectives_.who(), ": backward() gave a gradient for '",
      tracked.name,
      "' without a preceding forward(). Call forward() of DistributedDataParallel, not of the "
      "module. Add up losses that share a forward(), and call backward() once.");
  if (phase_ == Phase::kForwarded) begin_backward();
  TORCH_CHECK(!tracked.ready, collectives_.who(),
              ": expected backward() to reach each parameter once, got '", tracked.name,
              "' twice. Do not call backward() within backward(), as reentrant activation "
              "checkpointing does.");
  tracked.used = true;
  copy_gradient(index);
  mark_ready(index);
  arrived_.push_back(index);
  launch_complete_buckets();
}

void Reducer::begin_backward() {
  for (TrackedGrad& tracked : tracked_) tracked.ready = false;
  for (Bucket& bucket : buckets_) bucket.missing = bucket.members.size();
  next_ = 0;
  arrived_.clear();
  phase_ = Phase::kBackward;
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
    bucket.pending = collectives_.start_all_reduce(
        bucket.flat, bucket.averages ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM, std::move(what));
  }
}

void Reducer::wait_for_buckets() {
  for (std::size_t index = 0; index < next_; ++index) collectives_.wait(buckets_[index].pending);
}

void Reducer::copy_gradient(std::size_t index) {
  const at::NoGradGuard no_grad;
  TrackedGrad& tracked = tracked_[index];
  at::Tensor& grad = parameters_[index].mutable_grad();
  check_gradient(index, grad);
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
                    "' to be dense and match its parameter, ", form.described(), ", got layout ",
                    grad.layout(), ", ", grad.scalar_type(), " ", grad.sizes(), " on ",
                    grad.device(), ". Use layers with dense gradients.");
}

// A parameter that is converted or moved gets a new accumulator without our hook, so its gradients
// would silently stay local.
void Reducer::check_parameters() {
  for (std::size_t index = 0; index < tracked_.size(); ++index) {
    const TrackedGrad& tracked = tracked_[index];
    const at::Tensor& parameter = parameters_[index];
    if (torch::autograd::impl::try_get_grad_accumulator(parameter) == tracked.accumulator) continue;
    // A parameter may have new memory, for example after torch::load. The old accumulator's hook no
    // longer runs, so install the hook again.
    TORCH_CHECK_VALUE(tracked.form.fits(parameter), collectives_.who(), ": expected parameter '",
                      tracked.name, "' to stay as it was at construction, ",
                      tracked.form.described(), ", got ", parameter.scalar_type(), " ",
                      parameter.sizes(), " on ", parameter.device(),
                      ". Convert and move the module before constructing "
                      "DistributedDataParallel.");
    install_hook(index);
  }
}

void Reducer::finish() {
  const std::lock_guard lock(mutex_);
  phase_ = Phase::kIdle;
  std::vector<std::size_t> missing;
  for (std::size_t index = 0; index < tracked_.size(); ++index) {
    if (!tracked_[index].ready) missing.push_back(index);
  }
  if (!missing.empty() && !find_unused_) throw_for_unused(missing);
  for (const std::size_t index : missing) fill_in(index);
  launch_complete_buckets();
  wait_for_buckets();
  if (find_unused_) finish_unused(missing);
  for (TrackedGrad& tracked : tracked_) tracked.used = false;
  if (reordered_) return;
  // Rebuild buckets before the next forward, because gradients must not move until then.
  reordered_ = true;
  observed_order_ = arrived_;
  observed_order_.insert(observed_order_.end(), missing.begin(), missing.end());
}

// --- Buckets

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
      // Move a gradient from the old bucket to the new one.
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

// --- Parameters without a gradient

void Reducer::throw_for_unused(const std::vector<std::size_t>& missing) {
  // Wait, because other ranks take part in the reductions that this rank started.
  wait_for_buckets();
  TORCH_CHECK(false, collectives_.who(),
              ": expected backward() to give each parameter a gradient, got none for ",
              missing.size(), " of ", tracked_.size(), " parameters: ", names_of(missing),
              ". Make the loss depend on all parameters, freeze unused ones, or set "
              "find_unused_parameters.");
}

/// Fills in this rank's contribution for a parameter that backward did not reach: zero, or the
/// gradient accumulated under no_sync().
void Reducer::fill_in(std::size_t index) {
  const at::NoGradGuard no_grad;
  TrackedGrad& tracked = tracked_[index];
  const at::Tensor grad = parameters_[index].grad();
  // The user may have reset the gradient accumulated under no_sync().
  tracked.used = tracked.used && grad.defined();
  if (grad.defined()) {
    tracked.kept = grad.is_alias_of(tracked.view) ? grad.clone() : grad;
    copy_gradient(index);
  } else {
    tracked.view.zero_();
  }
  mark_ready(index);
}

/// Returns how many ranks used each parameter, on the parameters' device. A collective.
at::Tensor Reducer::ranks_using() const {
  at::Tensor used = at::zeros({static_cast<std::int64_t>(tracked_.size())}, at::kInt);
  auto* flags = used.mutable_data_ptr<std::int32_t>();
  for (std::size_t index = 0; index < tracked_.size(); ++index) flags[index] = tracked_[index].used;
  used = used.to(parameters_.front().device());
  collectives_.sum(used, "the comparison of unused parameters");
  return used;
}

/// Assigns the average to parameters that any rank used; all other parameters keep their old
/// gradient.
void Reducer::finish_unused(const std::vector<std::size_t>& missing) {
  const at::NoGradGuard no_grad;
  const at::Tensor all = ranks_using();
  // Only a rank that did not reach a parameter needs the counts. Other ranks avoid a
  // synchronization.
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
