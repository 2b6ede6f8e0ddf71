// SPDX-License-Identifier: BSD-3-Clause
// The plan: the properties of each slot's tensors, checked once.
//
// Note [A plan holds no tensor]
// Users own parameters and state. They move, swap, replace and delete tensors between steps, and a
// released tensor must be freed. Therefore a plan keeps no reference, strong or weak, to a tensor,
// and trusts no address. Each step borrows the tensors from their owners for the step's duration.
// The step compares everything on which a kernel depends: dtype, device, sizes, strides, storage
// bounds. Every tensor that matches the plan is used, even if the object or the address has
// changed. If a tensor does not match, the owner plans again. A new tensor at a deleted tensor's
// address is judged by its own properties. The only thing that a plan holds, weakly, is the storage
// in which a step left a parameter with a master: see Written.
#include <c10/util/Exception.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <utility>

#include "ops/check.h"
#include "ops/fused_step/step_engine.h"

namespace torchfuse::ops {

namespace {

/// Checks that `tensor` can be an operand beside `param`: element i of both is at the same offset.
void check_operand(const Argument& argument, const at::Tensor& tensor, const at::Tensor& param) {
  check_dense(argument, tensor);
  check_same_device(argument, tensor, param.device(), "params");
  check_same_sizes(argument, tensor, param, "params");
  if (!same_layout(tensor, param)) {
    fail(argument, "have the strides of params, " + c10::str(param.strides()),
         c10::str(tensor.strides()), "Create it with torch.zeros_like(param).");
  }
}

}  // namespace

Layout::Layout(const at::Tensor& tensor)
    : sizes(tensor.sizes()), strides(tensor.strides()), contiguous(tensor.is_contiguous()) {}

PlannedTensor::PlannedTensor(const at::Tensor& tensor)
    : keys(tensor.key_set()),
      type(tensor.dtype()),
      device(tensor.device()),
      exists(true),
      itemsize(static_cast<std::int64_t>(tensor.itemsize())) {}

StepEngine::StepEngine(std::unique_ptr<Algorithm> algorithm, std::string caller)
    : algorithm_(std::move(algorithm)),
      caller_(std::move(caller)),
      num_states_(algorithm_->state_names().size()),
      num_elementwise_(num_states_ - algorithm_->num_tensor_states()),
      has_layouts_(algorithm_->needs_layouts()) {
  TORCH_INTERNAL_ASSERT(num_states_ <= SlotTensors::kMaxStates);
}

const char* StepEngine::caller() const {
  return caller_.empty() ? algorithm_->op() : caller_.c_str();
}

/// `list` is the op's list; `key` is the name of the entry in an optimizer's per-parameter state.
Argument StepEngine::argument(const char* list, const char* key, std::size_t index,
                              const FusedSlot& slot) const {
  if (caller_.empty()) return {caller(), list, static_cast<std::int64_t>(index)};
  return {caller(), key, slot.position, slot.group};
}

/// Like the overload above, for a slot of the plan.
Argument StepEngine::argument(const char* list, const char* key, std::size_t index) const {
  if (caller_.empty()) return {caller(), list, static_cast<std::int64_t>(index)};
  return {caller(), key, positions_[index], planned_[index].row.group};
}

PlannedSlot StepEngine::check_slot(std::size_t index, const FusedSlot& slot) {
  const at::Tensor& param = slot.param;
  const Argument param_argument = argument("params", "", index, slot);
  check_dense(param_argument, param);

  PlannedSlot planned;
  planned.key.device = param.device();
  planned.key.param = dtype_of(param_argument, param);
  planned.key.sharding = sharding_of(slot);
  planned.layout = Layout(param);
  if (has_layouts_ && !slot.whole_sizes.empty()) {
    planned.whole = std::make_unique<PlannedSlot::Whole>();
    Layout& whole = planned.whole->layout;
    whole.sizes = slot.whole_sizes;
    whole.strides = slot.whole_strides.empty() ? c10::contiguous_strides(slot.whole_sizes)
                                               : c10::DimVector(slot.whole_strides);
    planned.whole->name_checksum = slot.name_checksum;
  }
  planned.param = PlannedTensor(param);
  planned.row.numel = param.numel();
  planned.row.group = static_cast<std::int32_t>(slot.group);

  check_states(index, slot, planned);
  check_master(index, slot, planned);
  check_ema(index, slot, planned);
  check_rounding(index, slot, planned);
  const Argument step_argument = argument("state_steps", "step", index, slot);
  check_scalar(step_argument, slot.step, at::kFloat);
  check_same_device(step_argument, slot.step, param.device(), "params");
  planned.step = PlannedTensor(slot.step);
  if (slot.start.defined()) {
    const Argument start_argument = argument("starts", "momentum_start", index, slot);
    check_scalar(start_argument, slot.start, at::kFloat);
    check_same_device(start_argument, slot.start, param.device(), "params");
    planned.start = PlannedTensor(slot.start);
  }
  check_tensor_state(index, slot, planned);
  for (std::size_t k = 0; k < num_states_; ++k) {
    if (planned.states[k].exists) planned.has_states |= 1u << k;
  }
  return planned;
}

/// Checks the states that have one entry per element. Each state has a separate dtype. An absent
/// state gets the first state's dtype in the key, so that one kernel can still update the tensors
/// together.
void StepEngine::check_states(std::size_t i, const FusedSlot& slot, PlannedSlot& planned) const {
  const std::vector<std::string>& names = algorithm_->state_names();
  check_same_length(caller(), "states", slot.states.size(), names.size(), "the algorithm's states");
  const bool wide = planned.key.param == kernels::DType::kFloat64;
  bool first = true;
  planned.key.states.fill(wide ? kernels::DType::kFloat64 : kernels::DType::kFloat32);
  for (std::size_t k = 0; k < names.size() - algorithm_->num_tensor_states(); ++k) {
    const at::Tensor& state = slot.states[k];
    if (!state.defined()) continue;
    const std::string list = names[k] + "s";
    const Argument state_argument = argument(list.c_str(), names[k].c_str(), i, slot);
    check_operand(state_argument, state, slot.param);
    const kernels::DType dtype = dtype_of(state_argument, state);
    if ((dtype == kernels::DType::kFloat64) != wide) {
      fail(state_argument,
           wide ? "be of the parameter's dtype, float64"
                : "be of dtype float32, float16 or bfloat16, as its parameter is not float64",
           c10::str(state.scalar_type()));
    }
    if (first) planned.key.states.fill(dtype);
    first = false;
    planned.key.states[k] = dtype;
    planned.states[k] = PlannedTensor(state);
  }
}

void StepEngine::check_master(std::size_t i, const FusedSlot& slot, PlannedSlot& planned) const {
  if (!slot.master.defined()) return;
  const bool remainder = slot.master.scalar_type() == at::kShort;
  const Argument master =
      argument("master_params", remainder ? "param_remainder" : "master_param", i, slot);
  if (!remainder && slot.master.scalar_type() != at::kFloat) {
    fail(master, "be of dtype float32, or int16 for remainders",
         c10::str(slot.master.scalar_type()));
  }
  // The checks reject integers, so a remainder is checked as a bfloat16 tensor of the same size.
  check_operand(master, remainder ? slot.master.view(at::kBFloat16) : slot.master, slot.param);
  const kernels::DType param = planned.key.param;
  if (remainder && param != kernels::DType::kBFloat16) {
    fail(master, "be of dtype float32, as only bfloat16 parameters have remainders",
         "Short for a " + c10::str(slot.param.scalar_type()) + " parameter");
  }
  if (kernels::size_of(param) != 2) {
    fail(master, "belong to a float16 or bfloat16 parameter", c10::str(slot.param.scalar_type()),
         "Other parameters need no master.");
  }
  planned.key.has_master = !remainder;
  planned.key.has_remainder = remainder;
  planned.master = PlannedTensor(slot.master);
}

void StepEngine::check_ema(std::size_t i, const FusedSlot& slot, PlannedSlot& planned) const {
  if (!slot.ema.defined()) return;
  const Argument ema = argument("ema_params", "ema_param", i, slot);
  check_operand(ema, slot.ema, slot.param);
  const bool wide = planned.key.param == kernels::DType::kFloat64;
  if (slot.ema.scalar_type() != (wide ? at::kDouble : at::kFloat)) {
    fail(ema,
         wide ? "be of the parameter's dtype, float64"
              : "be of dtype float32, as its parameter is not float64",
         c10::str(slot.ema.scalar_type()));
  }
  planned.ema = PlannedTensor(slot.ema);
}

void StepEngine::check_rounding(std::size_t i, const FusedSlot& slot, PlannedSlot& planned) const {
  planned.row.index = slot.index;
  planned.row.numbers = {slot.numbers.first, slot.numbers.run, slot.numbers.stride};
  planned.key.stochastic = slot.stochastic_rounding;
  if (!slot.stochastic_rounding) return;
  if (planned.key.param != kernels::DType::kBFloat16) {
    fail(argument("params", "", i, slot), "be of dtype bfloat16 under stochastic rounding",
         c10::str(slot.param.scalar_type()));
  }
  if (slot.numbers.first < 0 || slot.numbers.run < 0 || slot.numbers.stride < slot.numbers.run) {
    fail(argument("params", "", i, slot),
         "have element numbers of at least 0, and runs that do not overlap",
         c10::str("first ", slot.numbers.first, ", run ", slot.numbers.run, " and stride ",
                  slot.numbers.stride));
  }
  if (slot.master.defined()) {
    fail(argument("master_params", "master_param", i, slot), "be none under stochastic rounding",
         "a tensor", "Parameters with masters need no stochastic rounding.");
  }
}

/// Checks the state that contains one number for the entire tensor, if the algorithm has such a
/// state.
void StepEngine::check_tensor_state(std::size_t i, const FusedSlot& slot,
                                    PlannedSlot& planned) const {
  if (algorithm_->num_tensor_states() == 0) return;
  const std::string& name = algorithm_->state_names().back();
  const std::string list = name + "s";
  const Argument state_argument = argument(list.c_str(), name.c_str(), i, slot);
  const at::Tensor& state = slot.states.back();
  const bool wide = planned.key.param == kernels::DType::kFloat64;
  check_scalar(state_argument, state, wide ? at::kDouble : at::kFloat);
  check_same_device(state_argument, state, planned.key.device, "params");
  planned.states[slot.states.size() - 1] = PlannedTensor(state);
}

/// Returns the index among all shardings that were ever planned, which is the same in all
/// processes.
std::int32_t StepEngine::sharding_of(const FusedSlot& slot) {
  if (slot.shard_groups.empty()) return BucketKey::kWhole;
  const Sharding sharding{slot.shard_groups, slot.exchange_group};
  const auto found = std::find(shardings_.begin(), shardings_.end(), sharding);
  const auto index = static_cast<std::int32_t>(found - shardings_.begin());
  if (found == shardings_.end()) shardings_.push_back(sharding);
  return index;
}

void StepEngine::plan(const std::vector<FusedSlot>& slots) {
  std::vector<PlannedSlot> planned;
  std::vector<std::int64_t> positions;
  planned.reserve(slots.size());
  positions.reserve(slots.size());
  for (std::size_t i = 0; i < slots.size(); ++i) {
    PlannedSlot& slot = planned.emplace_back(check_slot(i, slots[i]));
    slot.first_alike = i;
    if (i > 0 && planned[i - 1].key == slot.key && planned[i - 1].row.group == slot.row.group) {
      slot.first_alike = planned[i - 1].first_alike;
    }
    positions.push_back(slots[i].position);
  }
  planned_ = std::move(planned);
  has_masters_ = std::any_of(planned_.begin(), planned_.end(),
                             [](const PlannedSlot& slot) { return slot.key.has_master; });
  positions_ = std::move(positions);
}

}  // namespace torchfuse::ops
