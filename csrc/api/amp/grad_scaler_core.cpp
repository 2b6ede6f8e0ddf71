// SPDX-License-Identifier: BSD-3-Clause
#include <torchfuse/amp/grad_scaler_core.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DispatchKey.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

#include <torchfuse/ops.h>

namespace torchfuse::amp {
namespace {

/// Gradients that one launch can take together.
struct GradList {
  at::Device device;
  /// DTensor and other Python subclasses: torch's own op knows how to treat them, per dtype.
  bool subclass;
  at::ScalarType dtype;  ///< of subclasses; plain tensors of all dtypes share a list
  std::vector<at::Tensor> grads;
};

bool is_subclass(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python);
}

/// The tensor that holds the values of a parameter's gradient; undefined without a gradient.
at::Tensor grad_values(const at::Tensor& param, bool allow_fp16) {
  TORCH_CHECK_TYPE(
      param.defined(),
      "GradScaler: expected every parameter to be a tensor, got an undefined one. Remove "
      "it from the optimizer.");
  at::Tensor& grad = param.mutable_grad();
  if (!grad.defined()) return {};
  TORCH_CHECK_VALUE(allow_fp16 || grad.scalar_type() != at::kHalf,
                    "Attempting to unscale FP16 gradients.");
  if (!grad.is_sparse()) return grad;
  if (grad.scalar_type() == at::kHalf) grad = grad.coalesce();
  return grad._values();
}

std::vector<GradList> group_grads(const std::vector<at::Tensor>& params, bool allow_fp16) {
  std::vector<GradList> lists;
  for (const at::Tensor& param : params) {
    at::Tensor values = grad_values(param, allow_fp16);
    if (!values.defined()) continue;
    const bool subclass = is_subclass(values);
    const auto list = std::find_if(lists.begin(), lists.end(), [&](const GradList& candidate) {
      return candidate.device == values.device() && candidate.subclass == subclass &&
             (!subclass || candidate.dtype == values.scalar_type());
    });
    if (list != lists.end()) {
      list->grads.push_back(std::move(values));
    } else {
      lists.push_back({values.device(), subclass, values.scalar_type(), {values}});
    }
  }
  return lists;
}

at::TensorOptions float_on(const at::Device& device) {
  return at::TensorOptions().dtype(at::kFloat).device(device);
}

void require_one_element(const char* name, const at::Tensor& tensor, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(!tensor.defined() || (tensor.numel() == 1 && tensor.scalar_type() == dtype),
                    "GradScaler: expected ", name, " to be a tensor of 1 element of type ", dtype,
                    ", got ", tensor.sizes(), " of type ", tensor.scalar_type(), ".");
}

}  // namespace

GradScalerCore::GradScalerCore(std::int64_t hysteresis)
    : hysteresis_(hysteresis), init_hysteresis_tracker_(hysteresis) {
  TORCH_CHECK_VALUE(hysteresis >= 1 && hysteresis <= std::numeric_limits<std::int32_t>::max(),
                    "GradScaler: expected hysteresis to be a 32-bit count of at least 1, got ",
                    hysteresis, ".");
}

void GradScalerCore::initialize(const at::Device& device, double scale,
                                std::int64_t growth_tracker) {
  scale_ = at::full({}, scale, float_on(device));
  growth_tracker_ = at::full({}, growth_tracker, float_on(device).dtype(at::kInt));
}

void GradScalerCore::set_scale(at::Tensor scale) {
  require_one_element("_scale", scale, at::kFloat);
  scale_ = std::move(scale);
}

void GradScalerCore::set_growth_tracker(at::Tensor growth_tracker) {
  require_one_element("_growth_tracker", growth_tracker, at::kInt);
  growth_tracker_ = std::move(growth_tracker);
}

std::int64_t GradScalerCore::hysteresis_tracker() const {
  return hysteresis_tracker_.defined() ? hysteresis_tracker_.item<std::int32_t>()
                                       : init_hysteresis_tracker_;
}

void GradScalerCore::set_hysteresis_tracker(std::int64_t value) {
  init_hysteresis_tracker_ = value;
  if (hysteresis_tracker_.defined()) hysteresis_tracker_.fill_(value);
}

at::Tensor GradScalerCore::inv_scale() const {
  // In fp64, so that the quotient is rounded once.
  return scale_.to(at::kDouble).reciprocal().to(at::kFloat);
}

at::Tensor GradScalerCore::clear_slot(Key optimizer, const at::Device& device) {
  std::vector<at::Tensor>& slots = slots_[optimizer];
  for (at::Tensor& slot : slots) {
    if (slot.device() == device) return slot.zero_();
  }
  slots.push_back(at::zeros({}, float_on(device)));
  return slots.back();
}

at::Tensor& GradScalerCore::record_slot(Key optimizer, const at::Device& device,
                                        std::vector<at::Tensor>& recorded) {
  for (at::Tensor& slot : recorded) {
    if (slot.device() == device) return slot;
  }
  recorded.push_back(clear_slot(optimizer, device));
  return recorded.back();
}

std::vector<at::Tensor> GradScalerCore::unscale_(Key optimizer,
                                                 const std::vector<at::Tensor>& params,
                                                 const at::Tensor& inv_scale, bool allow_fp16) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> recorded;
  for (const GradList& list : group_grads(params, allow_fp16)) {
    at::Tensor& slot = record_slot(optimizer, list.device, recorded);
    const at::Tensor factor = inv_scale.to(list.device, /*non_blocking=*/true);
    if (list.subclass) {
      at::_amp_foreach_non_finite_check_and_unscale_(list.grads, slot, factor);
    } else {
      multi_tensor_unscale_(list.grads, slot, factor);
    }
  }
  return recorded;
}

std::vector<at::Tensor> GradScalerCore::check(Key optimizer,
                                              const std::vector<at::Tensor>& params) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> recorded;
  for (const GradList& list : group_grads(params, /*allow_fp16=*/true)) {
    at::Tensor& slot = record_slot(optimizer, list.device, recorded);
    if (list.subclass) {
      const at::Tensor one = at::ones({}, float_on(list.device));
      at::_amp_foreach_non_finite_check_and_unscale_(list.grads, slot, one);
    } else {
      at::maximum_out(slot, slot, std::get<1>(multi_tensor_l2_norm(list.grads)));
    }
  }
  return recorded;
}

at::Tensor GradScalerCore::combine(const std::vector<at::Tensor>& slots) const {
  TORCH_CHECK(!slots.empty(), "No inf checks were recorded.");
  const auto on_scale_device = [this](const at::Tensor& slot) {
    return slot.to(scale_.device(), /*non_blocking=*/true);
  };
  at::Tensor found_inf = on_scale_device(slots.front());
  for (std::size_t i = 1; i < slots.size(); ++i) {
    found_inf = at::maximum(found_inf, on_scale_device(slots[i]));
  }
  return found_inf;
}

void GradScalerCore::ensure_hysteresis_tracker() {
  if (hysteresis_ == 1) return;
  if (!hysteresis_tracker_.defined()) {
    hysteresis_tracker_ = at::full({}, init_hysteresis_tracker_, growth_tracker_.options());
  } else if (hysteresis_tracker_.device() != scale_.device()) {
    hysteresis_tracker_ = hysteresis_tracker_.to(scale_.device(), /*non_blocking=*/true);
  }
}

void GradScalerCore::update(const std::vector<at::Tensor>& slots, const ScaleRule& rule) {
  const at::NoGradGuard no_grad;
  ensure_hysteresis_tracker();
  const std::optional<at::Tensor> tracker =
      hysteresis_ > 1 ? std::optional<at::Tensor>(hysteresis_tracker_) : std::nullopt;
  amp_update_scale_(scale_, growth_tracker_, combine(slots), rule.growth_factor,
                    rule.backoff_factor, rule.growth_interval, tracker, hysteresis_);
}

}  // namespace torchfuse::amp
