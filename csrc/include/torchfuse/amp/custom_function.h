// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <torch/autograd.h>

#include <optional>
#include <vector>

#include <torchfuse/amp/autocast.h>
#include <torchfuse/export.h>

namespace torchfuse::amp {

/// Sets how forward() of a custom autograd function runs under autocast: the C++ counterpart of
/// torch.amp.custom_fwd. Construct one at the start of forward(), and a CustomBackward at the start
/// of backward().
///
///     struct Square : torch::autograd::Function<Square> {
///       static torch::Tensor forward(torch::autograd::AutogradContext* ctx, torch::Tensor x) {
///         const torchfuse::amp::CustomForward amp(ctx, torch::kCUDA, torch::kFloat);
///         x = amp.cast(x);
///         ctx->save_for_backward({x});
///         return x * x;
///       }
///       static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
///                                                      torch::autograd::variable_list grads) {
///         const torchfuse::amp::CustomBackward amp(ctx, torch::kCUDA);
///         return {2 * ctx->get_saved_variables()[0] * grads[0]};
///       }
///     };
///
/// Without `cast_inputs`, the function runs in its caller's autocast state. With `cast_inputs`, and
/// if autocast is on, forward() runs with autocast off, on the inputs that it passes to cast(). If
/// autocast is off, cast() returns its inputs unchanged.
class TORCHFUSE_API CustomForward {
 public:
  /// @param ctx context of forward(); stores the autocast state for backward().
  /// @param device_type kCPU or kCUDA.
  /// @param cast_inputs floating-point dtype for cast(); none: no casts.
  /// @throws c10::Error for another device type, or a dtype that is not floating-point.
  [[nodiscard]] CustomForward(torch::autograd::AutogradContext* ctx, c10::DeviceType device_type,
                              std::optional<c10::ScalarType> cast_inputs = std::nullopt);

  /// Returns the tensor in the dtype `cast_inputs` if that was given, autocast was on, and the
  /// tensor is fp32, fp16 or bf16 on a device of type `device_type`; otherwise the tensor itself.
  /// The gradient has the tensor's own dtype.
  at::Tensor cast(const at::Tensor& tensor) const;
  /// Returns the result of cast() for each tensor.
  std::vector<at::Tensor> cast(const std::vector<at::Tensor>& tensors) const;
  /// Returns the result of cast() for the tensor, or none if there is no tensor.
  std::optional<at::Tensor> cast(const std::optional<at::Tensor>& tensor) const;

 private:
  c10::DeviceType device_type_;
  std::optional<c10::ScalarType> cast_to_;  ///< none: inputs stay unchanged
  std::optional<AutocastGuard> island_;
};

/// Restores in backward() the autocast state of forward(), on any of autograd's threads: the C++
/// counterpart of torch.amp.custom_bwd. See CustomForward for an example.
class TORCHFUSE_API CustomBackward {
 public:
  /// @param ctx context of backward().
  /// @param device_type device type that CustomForward was given.
  /// @throws c10::Error if forward() constructed no CustomForward for this device type.
  [[nodiscard]] CustomBackward(torch::autograd::AutogradContext* ctx, c10::DeviceType device_type);

 private:
  AutocastGuard guard_;
};

}  // namespace torchfuse::amp
