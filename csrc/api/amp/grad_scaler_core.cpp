// SPDX-License-Identifier: BSD-3-Clause
#include <torchfuse/amp/grad_scaler_core.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/empty.h>
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

#include <torchfuse/collectives.h>
#include <torchfuse/device_copy.h>
#include <torchfuse/ops.h>

namespace torchfuse::amp {
namespace {

/// Gradients that one launch processes together.
struct GradList {
  at::Device device;
  /// Whether these are DTensors or other Python subclasses, which torch's op handles per dtype.
  bool subclass;
  at::ScalarType dtype;  ///< only for subclasses; plain tensors of all dtypes share a list
  std::vector<at::Tensor> grads;
};

bool is_subclass(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python);
}

/// Returns the values of a parameter's gradient; undefined without a gradient.
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

/// Fills the elements one by one on the device. A copy from the host would synchronize.
void fill_elements(const at::Tensor& tensor, const std::vector<std::int64_t>& values) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    tensor[static_cast<std::int64_t>(i)].fill_(values[i]);
  }
}

void require_one_element(const char* name, const at::Tensor& tensor, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(!tensor.defined() || (tensor.numel() == 1 && tensor.scalar_type() == dtype),
                    "GradScaler: expected ", name, " to be a tensor of 1 element of type ", dtype,
                    ", got ", tensor.sizes(), " of type ", tensor.scalar_type(), ".");
}

/// Throws during a CUDA graph capture, because memory allocated during a capture belongs to the
/// graph.
void check_not_capturing(const at::Device& device) {
  TORCH_CHECK(!is_capturing(device),
              "GradScaler: the scale or an optimizer's flag was first used during a CUDA graph "
              "capture. Run one iteration of scale, step and update before the capture.");
}

void check_extras(const ScalerExtras& extras) {
  TORCH_CHECK_VALUE(
      extras.hysteresis >= 1 && extras.hysteresis <= std::numeric_limits<std::int32_t>::max(),
      "GradScaler: expected hysteresis to be a 32-bit count of at least 1, got ", extras.hysteresis,
      ".");
  constexpr double kLargest = std::numeric_limits<float>::max();
  const double min_scale = extras.min_scale.value_or(0.0);
  const double max_scale = extras.max_scale.value_or(kLargest);
  // Written so that NaN fails.
  TORCH_CHECK_VALUE(min_scale >= 0.0 && min_scale <= max_scale && max_scale <= kLargest,
                    "GradScaler: expected 0 <= min_scale <= max_scale within fp32, got min_scale ",
                    min_scale, " and max_scale ", max_scale, ".");
  TORCH_CHECK_VALUE(min_scale <= kLargestScale,
                    "GradScaler: expected min_scale to be at most 2^126, got ", min_scale,
                    ". The reciprocal of a larger scale is not a normal fp32 number.");
  TORCH_CHECK_VALUE(extras.history_size >= 0,
                    "GradScaler: expected history_size to be at least 0, got ", extras.history_size,
                    ".");
}

}  // namespace

GradScalerCore::GradScalerCore(ScalerExtras extras)
    : extras_(std::move(extras)), init_hysteresis_tracker_(extras_.hysteresis) {
  check_extras(extras_);
}

void GradScalerCore::initialize(const at::Device& device, double scale,
                                std::int64_t growth_tracker) {
  check_not_capturing(device);
  scale_ = at::full({}, scale, float_on(device));
  growth_tracker_ = at::full({}, growth_tracker, float_on(device).dtype(at::kInt));
  ensure_state();
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

std::vector<std::int64_t> GradScalerCore::counts() const {
  if (!counts_.defined()) return init_counts_;
  const at::Tensor counts = counts_.cpu();
  const auto* data = counts.const_data_ptr<std::int64_t>();
  return {data, data + counts.numel()};
}

void GradScalerCore::set_counts(const std::vector<std::int64_t>& counts) {
  TORCH_CHECK_VALUE(counts.size() == init_counts_.size(),
                    "GradScaler: expected 3 counts (updates, overflows, last), got ", counts.size(),
                    ".");
  init_counts_ = counts;
  if (counts_.defined()) fill_elements(counts_, counts);
}

std::vector<ScaleHistoryEntry> GradScalerCore::scale_history() const {
  if (!history_.defined()) return {};
  const std::int64_t updates = counts()[0];
  const at::Tensor history = history_.cpu();
  const auto* rows = history.const_data_ptr<float>();
  std::vector<ScaleHistoryEntry> entries;
  // Counts may come from a checkpoint, but checkpoints contain no history.
  const std::int64_t first = std::max(updates - extras_.history_size, init_counts_[0]);
  for (std::int64_t step = first; step < updates; ++step) {
    const float* row = rows + 2 * (step % extras_.history_size);
    entries.push_back({step, row[0], row[1] != 0.0f});
  }
  return entries;
}

const at::Tensor& GradScalerCore::inv_scale() {
  const at::NoGradGuard no_grad;
  ensure_state();
  // The fp64 reciprocal makes the fp32 result correctly rounded.
  reciprocal_.copy_(scale_.reshape(at::IntArrayRef())).reciprocal_();
  return inv_scale_.copy_(reciprocal_);
}

at::Tensor GradScalerCore::found_inf(Key optimizer, const at::Device& device) {
  std::vector<at::Tensor>& flags = found_inf_[optimizer];
  for (const at::Tensor& flag : flags) {
    if (flag.device() == device) return flag;
  }
  check_not_capturing(device);
  flags.push_back(at::zeros({}, float_on(device)));
  return flags.back();
}

at::Tensor& GradScalerCore::record_found_inf(Key optimizer, const at::Device& device,
                                             std::vector<at::Tensor>& recorded) {
  for (at::Tensor& flag : recorded) {
    if (flag.device() == device) return flag;
  }
  recorded.push_back(found_inf(optimizer, device).zero_());
  return recorded.back();
}

std::vector<at::Tensor> GradScalerCore::unscale_(Key optimizer,
                                                 const std::vector<at::Tensor>& params,
                                                 const at::Tensor& inv_scale, bool allow_fp16) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> recorded;
  for (const GradList& list : group_grads(params, allow_fp16)) {
    at::Tensor& flag = record_found_inf(optimizer, list.device, recorded);
    const at::Tensor factor = to_device(inv_scale, list.device);
    if (list.subclass) {
      at::_amp_foreach_non_finite_check_and_unscale_(list.grads, flag, factor);
    } else {
      multi_tensor_unscale_(list.grads, flag, factor);
    }
  }
  return share(optimizer, std::move(recorded));
}

std::vector<at::Tensor> GradScalerCore::check(Key optimizer,
                                              const std::vector<at::Tensor>& params) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> recorded;
  for (const GradList& list : group_grads(params, /*allow_fp16=*/true)) {
    at::Tensor& flag = record_found_inf(optimizer, list.device, recorded);
    if (list.subclass) {
      const at::Tensor one = at::ones({}, float_on(list.device));
      at::_amp_foreach_non_finite_check_and_unscale_(list.grads, flag, one);
    } else {
      at::maximum_out(flag, flag, std::get<1>(multi_tensor_l2_norm(list.grads)));
    }
  }
  return share(optimizer, std::move(recorded));
}

std::vector<at::Tensor> GradScalerCore::share(Key optimizer, std::vector<at::Tensor> recorded) {
  if (!extras_.process_group) return recorded;
  // A rank without gradients takes part too, because the other ranks wait for it.
  if (recorded.empty()) record_found_inf(optimizer, scale_.device(), recorded);
  ensure_state();
  // Reduce a separate tensor, because one of the flags receives the result.
  combined_.copy_(combine(recorded));
  all_reduce_(combined_, "max", {*extras_.process_group});
  return {found_inf(optimizer, scale_.device()).copy_(combined_)};
}

at::Tensor GradScalerCore::combine(const std::vector<at::Tensor>& flags) {
  TORCH_CHECK(!flags.empty(), "No inf checks were recorded.");
  const at::Tensor first = to_device(flags.front(), scale_.device());
  if (flags.size() == 1) return first;
  ensure_state();
  combined_.copy_(first);
  for (std::size_t i = 1; i < flags.size(); ++i) {
    at::maximum_out(combined_, combined_, to_device(flags[i], scale_.device()));
  }
  return combined_;
}

void GradScalerCore::ensure_state() {
  const at::Device device = scale_.device();
  if (counts_.defined() && counts_.device() == device) return;
  const at::TensorOptions integer = float_on(device).dtype(at::kInt);
  if (counts_.defined()) {
    // The scale moved to another device: move the trackers, counts and history too.
    for (at::Tensor* tensor : {&hysteresis_tracker_, &counts_, &history_}) {
      if (tensor->defined()) *tensor = to_device(*tensor, device);
    }
  } else {
    if (extras_.hysteresis > 1) {
      hysteresis_tracker_ = at::full({}, init_hysteresis_tracker_, integer);
    }
    counts_ = at::empty({static_cast<std::int64_t>(init_counts_.size())}, integer.dtype(at::kLong));
    fill_elements(counts_, init_counts_);
    if (extras_.history_size > 0) history_ = at::zeros({extras_.history_size, 2}, float_on(device));
  }
  reciprocal_ = at::zeros({}, float_on(device).dtype(at::kDouble));
  inv_scale_ = at::zeros({}, float_on(device));
  combined_ = at::zeros({}, float_on(device));
}

void GradScalerCore::update(const std::vector<at::Tensor>& flags, const ScaleRule& rule,
                            bool adjust) {
  const at::NoGradGuard no_grad;
  ensure_state();
  const auto if_defined = [](const at::Tensor& tensor) {
    return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
  };
  amp_update_scale_(
      scale_, growth_tracker_, combine(flags), rule.growth_factor, rule.backoff_factor,
      rule.growth_interval, if_defined(hysteresis_tracker_), extras_.hysteresis,
      std::max(extras_.min_scale.value_or(0.0), kSmallestScale),
      std::clamp(extras_.max_scale.value_or(kLargestScale), kSmallestScale, kLargestScale),
      extras_.dynamic && adjust, counts_, if_defined(history_));
}

}  // namespace torchfuse::amp
