// SPDX-License-Identifier: BSD-3-Clause
#include <torchfuse/parallel/sharded_optimizer.h>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <c10/util/irange.h>

#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "api/optim/fused_optimizer_impl.h"
#include "api/parallel/replica.h"
#include "api/parallel/shards.h"

namespace torchfuse::parallel {

using torch::optim::OptimizerParamGroup;

namespace {

/// What is wrong with a parameter that is to be split; empty: nothing.
std::string refusal_of(const at::Tensor& param) {
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

/// The modules with their parameters' places in the groups.
std::vector<GatherUnit> units_of(const GatherModules& modules,
                                 const std::vector<OptimizerParamGroup>& groups) {
  std::unordered_map<const void*, std::size_t> places;
  for (const OptimizerParamGroup& group : groups) {
    for (const at::Tensor& param : group.params()) {
      places.try_emplace(param.unsafeGetTensorImpl(), places.size());
    }
  }
  std::vector<GatherUnit> units;
  for (const auto& module : modules) {
    GatherUnit unit{module, {}};
    for (const at::Tensor& param :
         module == nullptr ? std::vector<at::Tensor>() : module->parameters()) {
      const auto place = places.find(param.unsafeGetTensorImpl());
      if (place != places.end()) unit.members.push_back(place->second);
    }
    units.push_back(std::move(unit));
  }
  return units;
}

/// What is wrong with a model whose gradients are to be split; empty: nothing.
std::string refusal_of(const Reducer& reducer, const std::vector<OptimizerParamGroup>& groups) {
  std::unordered_set<const void*> known;
  for (const OptimizerParamGroup& group : groups) {
    for (const at::Tensor& param : group.params()) known.insert(param.unsafeGetTensorImpl());
  }
  for (const auto& [name, parameter] : reducer.parameters()) {
    if (known.erase(parameter.unsafeGetTensorImpl()) == 1) continue;
    return "expected all parameters of the model that require gradients, got none in the place of "
           "'" +
           name + "'. Add it to a group, or freeze it before the model is made data-parallel.";
  }
  for (const OptimizerParamGroup& group : groups) {
    for (const at::Tensor& param : group.params()) {
      if (known.count(param.unsafeGetTensorImpl()) == 0 || !param.requires_grad()) continue;
      return c10::str("expected parameters of the model, got another one, of sizes ", param.sizes(),
                      ", whose gradients nobody would reduce. Give it an optimizer of its own.");
    }
  }
  return "";
}

/// What is wrong with modules that are to wait for their parameters; empty: nothing.
std::string refusal_of(const GatherModules& modules, const std::vector<GatherUnit>& units) {
  for (const std::size_t index : c10::irange(modules.size())) {
    const std::string where = c10::str("expected gather_in_forward[", index, "] to ");
    if (modules[index] == nullptr) return where + "be a module, got none.";
    if (units[index].members.empty()) {
      return where + "have parameters of the optimizer, got a " + modules[index]->name() +
             " without. Leave it out.";
    }
  }
  return "";
}

/// The groups with other tensors in the parameters' place.
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

std::string ShardedBase::refusal(const optim::FusedOptimizer& whole) {
  if (whole.step_options().write_back_grads != WriteBackGrads::kNothing) {
    return "expected write_back_grads to be kNothing, got another value. A process would store its "
           "own part alone.";
  }
  std::unordered_set<const void*> seen;
  const auto& groups = whole.param_groups();
  for (std::size_t group = 0; group < groups.size(); ++group) {
    const std::string name = optim::FusedOptimizer::options_name(group);
    const auto& params = groups[group].params();
    for (std::size_t index = 0; index < params.size(); ++index) {
      const std::string where = c10::str("expected ", name, ".params[", index, "]");
      if (!seen.insert(params[index].unsafeGetTensorImpl()).second) {
        return where + " to be in the parameter groups once, got it a second time. Remove one.";
      }
      const std::string found = refusal_of(params[index]);
      if (!found.empty()) return where + found;
    }
  }
  return "";
}

std::string ShardedBase::refusal(const optim::FusedOptimizer& whole,
                                 const DataParallelBase& model) {
  const std::string found = refusal(whole);
  return found.empty() ? refusal_of(*model.replica().reducer, whole.param_groups()) : found;
}

ShardedBase::ShardedBase(const optim::FusedOptimizer& whole,
                         const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                         const GatherModules& gather_in_forward)
    : ShardedBase(whole, group, refusal(whole), gather_in_forward, std::nullopt) {}

ShardedBase::ShardedBase(const optim::FusedOptimizer& whole, DataParallelBase& model,
                         const GatherModules& gather_in_forward)
    : ShardedBase(whole, model.replica().collectives.group(), refusal(whole, model),
                  gather_in_forward,
                  BucketSizes{model.replica().options.first_bucket_bytes(),
                              model.replica().options.bucket_bytes()}) {
  model.replica().give_parts_to(shards_);
}

ShardedBase::ShardedBase(const optim::FusedOptimizer& whole,
                         const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                         const std::string& refused, const GatherModules& modules,
                         std::optional<BucketSizes> scattered) {
  const auto units = units_of(modules, whole.param_groups());
  shards_ = std::make_shared<Shards>(whole.param_groups(), whole.described_options(),
                                     refused.empty() ? refusal_of(modules, units) : refused, group,
                                     units, scattered);
}

// A model whose gradients are split keeps the shards.
ShardedBase::~ShardedBase() {
  if (shards_ != nullptr) shards_->leave();
}

ShardedBase::ShardedBase(ShardedBase&&) noexcept = default;

ShardedBase& ShardedBase::operator=(ShardedBase&& other) noexcept {
  if (this == &other) return *this;
  if (shards_ != nullptr) shards_->leave();
  shards_ = std::move(other.shards_);
  return *this;
}

Shards& ShardedBase::shards() const {
  TORCH_CHECK(shards_ != nullptr, kSharded,
              ": expected an optimizer, got one that was moved from.");
  return *shards_;
}

std::vector<OptimizerParamGroup> ShardedBase::part_groups(
    const std::vector<OptimizerParamGroup>& whole) const {
  return with_tensors(whole, shards().parts());
}

std::vector<OptimizerParamGroup> ShardedBase::shape_groups(
    const std::vector<OptimizerParamGroup>& parts) const {
  std::vector<at::Tensor> shapes;
  for (const at::Tensor& param : shards().params()) {
    shapes.push_back(at::empty_like(param, param.options().device(at::kCPU).requires_grad(false)));
  }
  return with_tensors(parts, shapes);
}

void ShardedBase::attach(optim::FusedOptimizer& of_parts, States states) const {
  const FusedStep step(of_parts.algorithm());
  const auto& names = step.state_names();
  const auto first = names.end() - static_cast<std::ptrdiff_t>(step.num_tensor_states());
  std::unordered_set<std::string> numbers(first, names.end());
  numbers.insert("step");
  shards_->set_class(
      {std::move(numbers), std::move(states.state_dict), std::move(states.prepare_state_dict)});
  of_parts.impl_->shards = shards_;
}

void ShardedBase::zero_gradients(bool set_to_none) const { shards().zero_gradients(set_to_none); }

void ShardedBase::finish_gather() const { shards().finish_gather(); }

void ShardedBase::finish_gather(const torch::nn::Module& module) const {
  shards().finish_gather(module);
}

const std::vector<at::Tensor>& ShardedBase::model_parameters() const { return shards().params(); }

c10::impl::GenericDict ShardedBase::whole_state(const c10::impl::GenericDict& of_parts) const {
  return shards().whole_state(of_parts);
}

c10::impl::GenericDict ShardedBase::own_state(const c10::impl::GenericDict& whole) const {
  return shards().own_state(whole);
}

}  // namespace torchfuse::parallel
