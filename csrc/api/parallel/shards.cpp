// SPDX-License-Identifier: BSD-3-Clause
#include "api/parallel/shards.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torchfuse/collectives.h>
#include <torchfuse/parallel/gradient_reducer.h>

#include <utility>

#include "api/parallel/agreement.h"

namespace torchfuse::parallel {

namespace {

constexpr const char* kCompared = "the parameters, their gradients and the options";

std::vector<at::Tensor> params_of(const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  std::vector<at::Tensor> params;
  for (const auto& group : groups) {
    params.insert(params.end(), group.params().begin(), group.params().end());
  }
  return params;
}

/// Tensors of inference mode do not count what is written to them.
std::int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : tensor._version();
}

/// Which parameters lie in each flat tensor: all of a unit and a kind; or a bucket, with those
/// first that backward reaches first.
std::vector<std::vector<std::size_t>> members_of_flats(
    const std::vector<at::Tensor>& params, const std::vector<GatherUnit>& units,
    const std::optional<BucketSizes>& scattered) {
  return scattered.has_value() ? GradientReducer::plan(params, scattered->first, scattered->others)
                               : plan_units(params, units);
}

/// What all processes must have alike.
std::string described_units(const std::vector<GatherUnit>& units) {
  std::string text = "gather_in_forward over parameters";
  for (const GatherUnit& unit : units) text += c10::str(" [", c10::Join(", ", unit.members), "]");
  return text;
}

std::string joined(const std::vector<std::string>& lines) { return c10::Join("\n", lines); }

/// All but the parts, which begin when the processes have agreed.
GradientParts plan_parts(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                         const Collectives& collectives, const std::vector<GatherUnit>& units,
                         const std::optional<BucketSizes>& scattered) {
  std::vector<at::Tensor> params = params_of(groups);
  Partition partition(params, members_of_flats(params, units, scattered), collectives.rank(),
                      collectives.size());
  return {std::move(params), {}, std::move(partition)};
}

}  // namespace

Shards::Shards(const std::vector<torch::optim::OptimizerParamGroup>& groups,
               const std::vector<std::string>& options, const std::string& refusal,
               c10::intrusive_ptr<c10d::ProcessGroup> group, const std::vector<GatherUnit>& units,
               std::optional<BucketSizes> scattered)
    : Shards(groups, options, refusal, Collectives(std::move(group), kSharded), units, scattered) {}

Shards::Shards(const std::vector<torch::optim::OptimizerParamGroup>& groups,
               const std::vector<std::string>& options, const std::string& refusal,
               Collectives collectives, const std::vector<GatherUnit>& units,
               std::optional<BucketSizes> scattered)
    : GradientParts(plan_parts(groups, collectives, units, scattered)),
      collectives_(std::move(collectives)),
      scatters_(scattered.has_value()) {
  const at::NoGradGuard no_grad;
  for (const auto& each : groups) model_.emplace_back(each.params());
  if (collectives_.size() > 1) {
    // Steps find the group by its name.
    torchfuse::group_size(collectives_.name(), kSharded);
    groups_ = {collectives_.name()};
  }
  std::vector<std::string> all = options;
  if (!units.empty()) all.push_back(described_units(units));
  if (!refusal.empty()) all.push_back(refusal);
  compare(kCompared, joined(described(all)), all);
  TORCH_CHECK_VALUE(refusal.empty(), kSharded, ": ", refusal);
  finish_gathers_of(params_);
  std::vector<at::Tensor> flats;
  for (const FlatPlan& plan : partition_.flats()) {
    flats.push_back(at::zeros({plan.numel}, plan.options));
  }
  for (std::size_t index = 0; index < params_.size(); ++index) {
    at::Tensor& param = params_[index];
    const at::Tensor view =
        partition_.view_of(index, flats[partition_.places()[index].flat], param);
    view.copy_(param.detach());
    param.set_data(view);
    addresses_.push_back(param.const_data_ptr());
    parts_.push_back(partition_.part_of(index, param.detach()));
  }
  gathers_ = std::make_shared<Gathers>(collectives_, partition_, flats, units);
  if (!units.empty()) remember(gathers_);
  return_gradients();
}

/// Of the model's parameter, or of its part.
const at::Tensor& Shards::gradient(std::size_t index) const {
  // Before there are parts there is nothing that could be scattered.
  return scatters_ && index < parts_.size() ? parts_[index].grad() : params_[index].grad();
}

bool Shards::moved(std::size_t index) const {
  return index < addresses_.size() && params_[index].const_data_ptr() != addresses_[index];
}

std::vector<std::string> Shards::described(const std::vector<std::string>& options) const {
  std::vector<std::string> lines;
  for (std::size_t index = 0; index < params_.size(); ++index) {
    const at::Tensor& param = params_[index];
    const at::Tensor& grad = gradient(index);
    lines.push_back(c10::str(
        "parameter ", index, " ", param.scalar_type(), " ", param.sizes(),
        param.layout() == at::kStrided ? c10::str(" of strides ", param.strides()) : "",
        moved(index) ? ", in other memory" : "",
        grad.defined() ? c10::str(", with a ", grad.layout(), " gradient ", grad.scalar_type())
                       : std::string(", without a gradient"),
        scatters_ && param.grad().defined() ? ", with a whole gradient" : ""));
  }
  lines.insert(lines.end(), options.begin(), options.end());
  return lines;
}

/// A byte or two for each parameter, and the options.
std::string Shards::summary(const std::vector<std::string>& options) const {
  std::string text;
  for (std::size_t index = 0; index < params_.size(); ++index) {
    const at::Tensor& grad = gradient(index);
    text += moved(index) ? 'm' : 's';
    if (scatters_ && params_[index].grad().defined()) text += 'w';
    if (!grad.defined()) continue;
    text += static_cast<char>('A' + static_cast<int>(grad.scalar_type()));
    text += static_cast<char>('0' + static_cast<int>(grad.layout()));
  }
  return text + joined(options);
}

void Shards::compare(const char* what, const std::string& summary,
                     const std::vector<std::string>& options) const {
  // It must not depend on what may differ between processes: all have a CPU.
  const c10::Device device =
      collectives_.has_cpu() || params_.empty() ? c10::Device(at::kCPU) : params_.front().device();
  check_agreement(collectives_, device, kSharded, what, summary,
                  [&] { return described(options); });
}

// What a program does wrong on all ranks.
void Shards::check_program(const std::vector<torch::optim::OptimizerParamGroup>& groups) const {
  std::size_t next = 0;
  bool same = true;
  for (const auto& group : groups) {
    for (const at::Tensor& part : group.params()) {
      same = same && next < parts_.size() && part.is_same(parts_[next]);
      ++next;
    }
  }
  TORCH_CHECK(same && next == parts_.size(), kSharded,
              "::step: expected the parameters of the construction, ", parts_.size(), ", got ",
              next, ", or others. Make a new optimizer with all of them, and load the state of ",
              "this one.");
  TORCH_CHECK(!under_way(), kSharded,
              "::step: expected the last backward() to reach its end, got one that ended early, by "
              "an exception. Other ranks may be in another step: start again from a checkpoint.");
  if (parts_.empty() || scatters_) return;
  TORCH_CHECK(parts_[0].grad().is_same(sign_) && version_of(sign_) == sign_version_, kSharded,
              "::step: expected zero_grad() of the ShardedOptimizer or of the model, got that of a "
              "base class, which leaves the model's gradients. Call the one of the class itself.");
}

void Shards::check_gradients() const {
  for (std::size_t index = 0; index < params_.size(); ++index) {
    TORCH_CHECK(!moved(index), kSharded, "::step: expected parameter ", index,
                " to stay in the memory that the optimizer gave it, got another address. Move, "
                "convert and load models before the optimizer is made, and write values in place: "
                "param.copy_(value).");
    const at::Tensor& grad = params_[index].grad();
    if (!grad.defined()) continue;
    TORCH_CHECK(!scatters_, kSharded, "::step: expected parameter ", index,
                " to have no gradient of its own, got one: backward() left it within no_sync(), or "
                "the program set it. Run the last backward() before a step outside of no_sync().");
    TORCH_CHECK_VALUE(
        grad.layout() == at::kStrided, kSharded, "::step: expected the gradient of parameter ",
        index, " to be dense, got layout ", grad.layout(), ". Use layers with dense gradients.");
  }
}

bool Shards::compares_step() const {
  return collectives_.size() > 1 && (!stepped_ || collectives_.has_cpu());
}

void Shards::before_step(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                         const std::vector<std::string>& options) {
  finish_gather();
  check_program(groups);
  if (compares_step()) compare(kCompared, summary(options), options);
  check_gradients();
  if (!scatters_) take_gradients();
}

void Shards::take_gradients() {
  for (std::size_t index = 0; index < params_.size(); ++index) {
    const at::Tensor& param = params_[index];
    const at::Tensor& grad = param.grad();
    at::Tensor& of_part = parts_[index].mutable_grad();
    if (!grad.defined()) {
      of_part.reset();
    } else if (parts_[index].numel() > 0) {
      of_part = partition_.part_of(index, laid_out_like(param, grad.detach()));
    } else {
      // An empty part needs one, so that all ranks count alike.
      of_part = at::empty({0}, grad.options().requires_grad(false));
    }
  }
}

void Shards::zero_gradients(bool set_to_none) {
  std::vector<at::Tensor> tensors = params_;
  if (scatters_) tensors.insert(tensors.end(), parts_.begin(), parts_.end());
  for (const at::Tensor& tensor : tensors) {
    at::Tensor& grad = tensor.mutable_grad();
    if (!grad.defined()) continue;
    if (set_to_none) {
      grad.reset();
    } else {
      grad.detach_();
      grad.zero_();
    }
  }
  return_gradients();
}

void Shards::finish_step() {
  stepped_ = true;
  if (!scatters_) return;
  for (const at::Tensor& part : parts_) part.mutable_grad().reset();
}

void Shards::return_gradients() {
  if (parts_.empty() || scatters_) return;
  for (const at::Tensor& part : parts_) part.mutable_grad().reset();
  if (!sign_.defined()) sign_ = at::empty({0}, parts_[0].options());
  sign_version_ = version_of(sign_);
  parts_[0].mutable_grad() = sign_;
}

}  // namespace torchfuse::parallel
