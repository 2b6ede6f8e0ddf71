// SPDX-License-Identifier: BSD-3-Clause
#include "api/parallel/shards.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torchfuse/collectives.h>

#include "api/optim/fused_optimizer_impl.h"

namespace torchfuse::parallel {

using torch::optim::OptimizerParamGroup;

constexpr const char* kCompared = "the parameters, their gradients and the options";

Shards::Shards(const std::vector<OptimizerParamGroup>& groups,
               const std::vector<std::string>& options, const std::string& unsupported,
               c10::intrusive_ptr<c10d::ProcessGroup> group)
    : collectives_(std::move(group), kSharded),
      params_(optim::params_of(groups)),
      partition_(params_, collectives_.rank(), collectives_.size()) {
  const at::NoGradGuard no_grad;
  for (const OptimizerParamGroup& each : groups) model_.emplace_back(each.params());
  if (collectives_.size() > 1) {
    // Fail early if the group is not registered: steps find it by name.
    torchfuse::group_size(collectives_.name(), kSharded);
    groups_ = {collectives_.name()};
  }
  std::vector<std::string> all = described(options);
  if (!unsupported.empty()) all.push_back(unsupported);
  compare(kCompared, c10::Join("\n", all), [&] { return all; });
  TORCH_CHECK_VALUE(unsupported.empty(), kSharded, ": ", unsupported);
  for (const FlatPlan& plan : partition_.flats()) {
    flats_.push_back(at::zeros({plan.numel}, plan.options));
  }
  for (std::size_t index = 0; index < params_.size(); ++index) {
    at::Tensor& param = params_[index];
    const Place& place = partition_.places()[index];
    const at::Tensor view =
        flats_[place.flat].as_strided(param.sizes(), param.strides(), place.begin);
    view.copy_(param.detach());
    param.set_data(view);
    addresses_.push_back(param.const_data_ptr());
    shards_.push_back(partition_.shard_of(index, param.detach()));
  }
  drop_gradients();
}

bool Shards::moved(std::size_t index) const {
  return index < addresses_.size() && params_[index].const_data_ptr() != addresses_[index];
}

std::vector<std::string> Shards::described(const std::vector<std::string>& options) const {
  std::vector<std::string> lines;
  for (std::size_t index = 0; index < params_.size(); ++index) {
    const at::Tensor& param = params_[index];
    const at::Tensor& grad = param.grad();
    lines.push_back(c10::str(
        "parameter ", index, " ", param.scalar_type(), " ", param.sizes(),
        param.layout() == at::kStrided ? c10::str(" of strides ", param.strides()) : "",
        moved(index) ? ", in other memory" : "",
        grad.defined() ? c10::str(", with a ", grad.layout(), " gradient ", grad.scalar_type())
                       : std::string(", without a gradient")));
  }
  lines.insert(lines.end(), options.begin(), options.end());
  return lines;
}

/// Returns one to three bytes per parameter, and the options.
std::string Shards::summary(const std::vector<std::string>& options) const {
  std::string text;
  for (std::size_t index = 0; index < params_.size(); ++index) {
    const at::Tensor& grad = params_[index].grad();
    text += moved(index) ? 'm' : 's';
    if (!grad.defined()) continue;
    text += static_cast<char>('A' + static_cast<int>(grad.scalar_type()));
    text += static_cast<char>('0' + static_cast<int>(grad.layout()));
  }
  return text + c10::Join("\n", options);
}

void Shards::compare(const char* what, const std::string& summary,
                     const std::function<std::vector<std::string>()>& lines) const {
  // All ranks choose the same device, because a group either sends from the CPU or has only GPUs.
  const c10::Device device =
      collectives_.has_cpu() || params_.empty() ? c10::Device(at::kCPU) : params_.front().device();
  check_agreement(collectives_, device, what, summary, lines);
}

/// Checks for mistakes that a program makes on all ranks.
void Shards::check_program(const std::vector<OptimizerParamGroup>& groups) const {
  const std::vector<at::Tensor> given = optim::params_of(groups);
  const bool same =
      std::equal(given.begin(), given.end(), shards_.begin(), shards_.end(),
                 [](const at::Tensor& one, const at::Tensor& shard) { return one.is_same(shard); });
  TORCH_CHECK(same, kSharded, "::step: expected param_groups() to hold the ", shards_.size(),
              " shards from construction, got ", given.size(),
              " parameters or different ones. Construct a new optimizer with all parameters, and "
              "load this optimizer's state.");
  if (shards_.empty()) return;
  TORCH_CHECK(shards_[0].grad().is_same(marker_) && optim::version_of(marker_) == marker_version_,
              kSharded,
              "::step: zero_grad() was called through a base class, which does not reset the "
              "model's gradients. Call zero_grad() of the ShardedOptimizer or of the model.");
}

void Shards::check_gradients() const {
  for (std::size_t index = 0; index < params_.size(); ++index) {
    TORCH_CHECK(!moved(index), kSharded, "::step: expected parameter ", index,
                " to stay in the memory that the optimizer gave it, got another address. Move, "
                "convert and load models before constructing the optimizer, and write values in "
                "place: param.copy_(value).");
    const at::Tensor& grad = params_[index].grad();
    TORCH_CHECK_VALUE(!grad.defined() || grad.layout() == at::kStrided, kSharded,
                      "::step: expected the gradient of parameter ", index,
                      " to be dense, got layout ", grad.layout(),
                      ". Use layers with dense gradients.");
  }
}

bool Shards::compares_step() const {
  return collectives_.size() > 1 && (!stepped_ || collectives_.has_cpu());
}

void Shards::before_step(const std::vector<OptimizerParamGroup>& groups,
                         const std::vector<std::string>& options) {
  check_program(groups);
  if (compares_step()) compare(kCompared, summary(options), [&] { return described(options); });
  stepped_ = true;
  check_gradients();
  take_gradients();
}

void Shards::take_gradients() {
  for (std::size_t index = 0; index < params_.size(); ++index) {
    const at::Tensor& param = params_[index];
    const at::Tensor& grad = param.grad();
    at::Tensor& of_shard = shards_[index].mutable_grad();
    if (!grad.defined()) {
      of_shard.reset();
    } else if (shards_[index].numel() > 0) {
      of_shard = partition_.shard_of(index, laid_out_like(param, grad.detach()));
    } else {
      // An empty shard also needs a gradient, so that all ranks count the same steps.
      of_shard = at::empty({0}, grad.options().requires_grad(false));
    }
  }
}

void Shards::zero_gradients(bool set_to_none) {
  for (const at::Tensor& param : params_) {
    at::Tensor& grad = param.mutable_grad();
    if (!grad.defined()) continue;
    if (set_to_none) {
      grad.reset();
    } else {
      grad.detach_();
      grad.zero_();
    }
  }
  drop_gradients();
}

void Shards::drop_gradients() {
  if (shards_.empty()) return;
  for (const at::Tensor& shard : shards_) shard.mutable_grad().reset();
  if (!marker_.defined()) marker_ = at::empty({0}, shards_[0].options());
  marker_version_ = optim::version_of(marker_);
  shards_[0].mutable_grad() = marker_;
}

void Shards::gather() const {
  const at::NoGradGuard no_grad;
  if (collectives_.size() == 1) return;
  for (const at::Tensor& flat : flats_) {
    collectives_.all_gather(flat, flat.chunk(collectives_.size())[collectives_.rank()],
                            "the all-gather of updated parameters");
  }
}

}  // namespace torchfuse::parallel
