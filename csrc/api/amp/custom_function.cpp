// SPDX-License-Identifier: BSD-3-Clause
#include <torchfuse/amp/custom_function.h>

#include <ATen/autocast_mode.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <string>

namespace torchfuse::amp {
namespace {

using torch::autograd::AutogradContext;

// One entry per device type, so that a function can construct a CustomForward for each type.
std::string key_of(c10::DeviceType device_type) {
  return "torchfuse::amp::autocast " + c10::DeviceTypeName(device_type, /*lower_case=*/true);
}

c10::DeviceType checked(const AutogradContext* ctx, c10::DeviceType device_type,
                        std::optional<c10::ScalarType> cast_inputs) {
  TORCH_CHECK(ctx != nullptr,
              "CustomForward: expected ctx to be the context of forward(), got a "
              "null pointer.");
  TORCH_CHECK(device_type == c10::kCPU || device_type == c10::kCUDA,
              "CustomForward: expected device_type to be kCPU or kCUDA, got ", device_type, ".");
  TORCH_CHECK(!cast_inputs || c10::isFloatingType(*cast_inputs),
              "CustomForward: expected cast_inputs to be a floating-point type, got ",
              cast_inputs.value_or(c10::ScalarType::Undefined), ". Use kFloat for full precision.");
  return device_type;
}

AutocastGuard guard_of_forward(AutogradContext* ctx, c10::DeviceType device_type) {
  TORCH_CHECK(ctx != nullptr,
              "CustomBackward: expected ctx to be the context of backward(), got a "
              "null pointer.");
  const auto state = ctx->saved_data.find(key_of(device_type));
  TORCH_CHECK(state != ctx->saved_data.end(),
              "CustomBackward: expected forward() to construct a CustomForward for ", device_type,
              ", got none. Construct one at the start of forward().");
  const auto& values = state->second.toTupleRef().elements();
  return AutocastGuard(device_type, static_cast<c10::ScalarType>(values[1].toInt()),
                       /*enabled=*/values[0].toBool());
}

}  // namespace

CustomForward::CustomForward(AutogradContext* ctx, c10::DeviceType device_type,
                             std::optional<c10::ScalarType> cast_inputs)
    : device_type_(checked(ctx, device_type, cast_inputs)) {
  const bool enabled = at::autocast::is_autocast_enabled(device_type);
  const c10::ScalarType dtype = at::autocast::get_autocast_dtype(device_type);
  ctx->saved_data[key_of(device_type)] =
      c10::ivalue::Tuple::create(enabled && !cast_inputs, static_cast<std::int64_t>(dtype));
  if (!enabled || !cast_inputs) return;
  cast_to_ = cast_inputs;
  island_.emplace(device_type, std::nullopt, /*enabled=*/false);
}

at::Tensor CustomForward::cast(const at::Tensor& tensor) const {
  const bool casts = cast_to_ && tensor.defined() && tensor.is_floating_point() &&
                     tensor.device().type() == device_type_ && tensor.scalar_type() != at::kDouble;
  return casts ? tensor.to(*cast_to_) : tensor;
}

std::vector<at::Tensor> CustomForward::cast(const std::vector<at::Tensor>& tensors) const {
  std::vector<at::Tensor> result;
  result.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) result.push_back(cast(tensor));
  return result;
}

std::optional<at::Tensor> CustomForward::cast(const std::optional<at::Tensor>& tensor) const {
  return tensor ? std::optional<at::Tensor>(cast(*tensor)) : std::nullopt;
}

CustomBackward::CustomBackward(AutogradContext* ctx, c10::DeviceType device_type)
    : guard_(guard_of_forward(ctx, device_type)) {}

}  // namespace torchfuse::amp
