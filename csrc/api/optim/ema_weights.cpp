// SPDX-License-Identifier: BSD-3-Clause
// Exchange of parameters and their averages.
#include <c10/util/Exception.h>
#include <torchfuse/ema.h>
#include <torchfuse/optim/fused_optimizer.h>

#include <exception>

#include "api/message_of.h"
#include "fused_optimizer_impl.h"

namespace torchfuse::optim {

void FusedOptimizer::check_usable(const char* action) const {
  TORCH_CHECK(impl_ != nullptr, name(), "::", action,
              ": expected an optimizer, got a moved-from object.");
  TORCH_CHECK(!impl_->swapped.has_value(), name(), "::", action,
              ": expected the parameters to hold their own values, got their averages. Call "
              "swap_ema_() first, or end the scope of EmaWeights.");
}

void FusedOptimizer::Impl::swap_back(const char* name) {
  bool changed = false;
  for (Swapped& entry : *swapped) {
    changed = changed || (entry.version != 0 && entry.version != version_of(entry.param));
    entry.version = 0;
  }
  if (changed) {
    TORCH_WARN(name,
               "::swap_ema_: parameters were written while they held their averages. What was "
               "written is in the averages now, and the parameters are as before. Load weights "
               "after the averages are out.");
  }
  restore_swapped(name);
  if (shards) shards->share();
}

void FusedOptimizer::Impl::restore_swapped(const char* name) {
  // In reverse order, because parameters may share memory.
  for (; !swapped->empty(); swapped->pop_back()) {
    const auto& [param, ema, kept, version] = swapped->back();
    const at::ScalarType dtype = (kept.defined() ? kept : ema).scalar_type();
    TORCH_CHECK(param.scalar_type() == dtype, name, "::swap_ema_: expected a parameter of dtype ",
                dtype, ", as before the swap, got ", param.scalar_type(),
                ". Convert the model back, then call swap_ema_().");
    torchfuse::swap_ema_(param, ema, kept);
  }
  swapped.reset();
}

void FusedOptimizer::swap_ema_() {
  TORCH_CHECK(impl_ != nullptr, name(), ": expected an optimizer, got a moved-from object.");
  const Exclusive exclusive(impl_->lock, name());
  if (impl_->swapped.has_value()) return impl_->swap_back(name());
  TORCH_CHECK(step_options().ema.has_value(), name(),
              "::swap_ema_: expected ema_decay to be a number, got none. Set it in the options.");
  impl_->swapped.emplace();
  try {
    for (const torch::optim::OptimizerParamGroup& group : param_groups_) {
      for (const at::Tensor& param : group.params()) {
        const torch::optim::OptimizerParamState* state = find_state(param);
        SlotTensors slot;
        if (state == nullptr || !borrow_state(param, *state, group.options(), slot)) continue;
        const at::Tensor ema(
            c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(slot.ema));
        impl_->swapped->push_back({param, ema, torchfuse::swap_ema_(param, ema)});
      }
    }
    for (Impl::Swapped& entry : *impl_->swapped) entry.version = version_of(entry.param);
    if (impl_->shards) impl_->shards->share();
  } catch (...) {
    impl_->restore_swapped(name());
    throw;
  }
}

EmaWeights::EmaWeights(FusedOptimizer& optimizer) : name_(optimizer.name()) {
  optimizer.check_usable("EmaWeights");
  optimizer.swap_ema_();
  impl_ = optimizer.impl_;
}

EmaWeights::~EmaWeights() {
  try {
    const Exclusive exclusive(impl_->lock, name_);
    if (impl_->swapped.has_value()) impl_->swap_back(name_);
  } catch (const std::exception& error) {
    TORCH_WARN(
        name_,
        ": the end of EmaWeights' scope could not restore the parameters from their averages. "
        "Steps, saves and loads throw until swap_ema_() succeeds. ",
        message_of(error));
  }
}

}  // namespace torchfuse::optim
