// SPDX-License-Identifier: BSD-3-Clause
#include <torchfuse/parallel/sharded_optimizer.h>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <unordered_set>

#include "api/optim/fused_optimizer_impl.h"
#include "api/parallel/shards.h"

namespace torchfuse::parallel {

using torch::optim::OptimizerParamGroup;

namespace {

/// Returns why a parameter cannot be sharded, or an empty string.
std::string unsupported_reason(const at::Tensor& param) {
  const at::ScalarType dtype = param.scalar_type();
  const bool known =
      dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kDouble;
  if (param.layout() != at::kStrided || !known) {
    return c10::str(" to be a dense tensor of Float, Half, BFloat16 or Double, got layout ",
                    param.layout(), " and dtype ", dtype, ".");
  }
  if (!param.is_non_overlapping_and_dense()) {
    return c10::str(" to be without gaps or overlap in memory, got sizes ", param.sizes(),
                    " with strides ", param.strides(), ". Use param.contiguous().");
  }
  return "";
}

/// Returns the groups with `tensors` in place of the parameters.
std::vector<OptimizerParamGroup> with_tensors(const std::vector<OptimizerParamGroup>& groups,
                                              const std::vector<at::Tensor>& tensors) {
  std::vector<OptimizerParamGroup> result;
  auto next = tensors.begin();
  for (const OptimizerParamGroup& group : groups) {
    const auto end = next + static_cast<std::ptrdiff_t>(group.params().size());
    result.emplace_back(std::vector<at::Tensor>(next, end), group.options().clone());
    next = end;
  }
  return result;
}

}  // namespace

std::string ShardedBase::unsupported(const optim::FusedOptimizer& whole) {
  if (whole.step_options().write_back_grads != WriteBackGrads::kNothing) {
    return "expected write_back_grads to be kNothing, got another value. Each rank would store "
           "gradients for its shards only.";
  }
  std::unordered_set<const void*> seen;
  const auto& groups = whole.param_groups();
  for (std::size_t group = 0; group < groups.size(); ++group) {
    const std::string name = optim::FusedOptimizer::options_name(group);
    const auto& params = groups[group].params();
    for (std::size_t index = 0; index < params.size(); ++index) {
      const std::string where = c10::str("expected ", name, ".params[", index, "]");
      if (!seen.insert(params[index].unsafeGetTensorImpl()).second) {
        return where +
               " to be in the parameter groups once, got a duplicate. Remove the duplicate.";
      }
      const std::string found = unsupported_reason(params[index]);
      if (!found.empty()) return where + found;
    }
  }
  return "";
}

ShardedBase::ShardedBase(const optim::FusedOptimizer& whole,
                         const c10::intrusive_ptr<c10d::ProcessGroup>& group)
    : shards_(std::make_shared<Shards>(whole.param_groups(), whole.described_options(),
                                       unsupported(whole), group)) {}

ShardedBase::~ShardedBase() = default;
ShardedBase::ShardedBase(ShardedBase&&) noexcept = default;
ShardedBase& ShardedBase::operator=(ShardedBase&&) noexcept = default;

Shards& ShardedBase::shards() const {
  TORCH_CHECK(shards_ != nullptr, kSharded, ": expected an optimizer, got a moved-from object.");
  return *shards_;
}

ShardedBase::Groups ShardedBase::shard_groups(const Groups& whole) const {
  return with_tensors(whole, shards().shards());
}

ShardedBase::Groups ShardedBase::shape_groups(const Groups& of_shards) const {
  std::vector<at::Tensor> shapes;
  for (const at::Tensor& param : shards().params()) {
    shapes.push_back(at::empty_like(param, param.options().device(at::kCPU).requires_grad(false)));
  }
  return with_tensors(of_shards, shapes);
}

void ShardedBase::attach(optim::FusedOptimizer& of_shards, StateOfShards state_of_shards) const {
  const FusedStep step(of_shards.algorithm());
  const auto& names = step.state_names();
  const auto first = names.end() - static_cast<std::ptrdiff_t>(step.num_tensor_states());
  std::unordered_set<std::string> numbers(first, names.end());
  numbers.insert({"step", "momentum_start"});
  shards_->set_class({std::move(numbers), std::move(state_of_shards)});
  optim::ShardsOfModel split{
      shards_->groups(), {}, shards_->model_groups(), [shards = shards_] { shards->gather(); }};
  for (std::size_t index = 0; index < shards_->shards().size(); ++index) {
    split.first_elements.push_back(shards_->first_element(index));
  }
  of_shards.impl_->shards.emplace(std::move(split));
}

void ShardedBase::refuse_group() {
  TORCH_CHECK(false, kSharded,
              "::add_param_group: all parameters must be given at construction. Construct a new "
              "optimizer with all parameters, and load this optimizer's state.");
}

void ShardedBase::step_shards(optim::FusedOptimizer& of_shards,
                              const std::function<void()>& update) const {
  Shards& shards = this->shards();
  const std::vector<std::string> options =
      shards.compares_step() ? of_shards.described_options() : std::vector<std::string>();
  shards.before_step(of_shards.param_groups(), options);
  {
    const auto drop = c10::make_scope_exit([&shards] { shards.drop_gradients(); });
    update();
  }
  shards.gather();
}

void ShardedBase::zero_gradients(bool set_to_none) const { shards().zero_gradients(set_to_none); }

ShardedBase::StateDict ShardedBase::whole_state(const StateDict& of_shards) const {
  return shards().whole_state(of_shards);
}

ShardedBase::StateDict ShardedBase::own_state(const StateDict& whole) const {
  return shards().own_state(whole);
}

}  // namespace torchfuse::parallel
