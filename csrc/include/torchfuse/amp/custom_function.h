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

/// Sets how a custom autograd function's forward() runs under autocast: the C++ counterpart of
/// torch.amp.custom_fwd. Construct a CustomForward at the start of forward(), and a CustomBackward
/// at the start of backward().
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
/// Without `cast_inputs`, the function runs in its caller's autocast state. With `cast_inputs`,
/// forward() runs with autocast off if the caller had it on, and must pass its inputs to cast(). If
/// the caller had autocast off, cast() returns its inputs unchanged.
class TORCHFUSE_API CustomForward {
 public:
  /// @param ctx context of forward(); stores the autocast state for backward().
  /// @param device_type kCPU or kCUDA.
  /// @param cast_inputs floating-point dtype for cast(). `nullopt` (default) disables casts.
  /// @throws c10::Error for any other device type, or a dtype that is not floating-point.
  [[nodiscard]] CustomForward(torch::autograd::AutogradContext* ctx, c10::DeviceType device_type,
                              std::optional<c10::ScalarType> cast_inputs = std::nullopt);

  /// Casts the tensor to `cast_inputs` if `cast_inputs` was given, autocast was on, and the tensor
  /// is floating-point but not fp64, on a device of type `device_type`. Otherwise returns the
  /// tensor itself. The gradient has the original tensor's dtype.
  at::Tensor cast(const at::Tensor& tensor) const;
  /// Calls cast() for each tensor.
  std::vector<at::Tensor> cast(const std::vector<at::Tensor>& tensors) const;
  /// Calls cast() for the tensor, or returns `nullopt` if there is no tensor.
  std::optional<at::Tensor> cast(const std::optional<at::Tensor>& tensor) const;

 private:
  c10::DeviceType device_type_;
  std::optional<c10::ScalarType> cast_to_;  ///< `nullopt`: inputs stay unchanged
  std::optional<AutocastGuard> island_;
};

/// Restores forward()'s autocast state in backward(), on any autograd thread: the C++ counterpart
/// of torch.amp.custom_bwd. See CustomForward for an example.
class TORCHFUSE_API CustomBackward {
 public:
  /// @param ctx context of backward().
  /// @param device_type device type that was passed to CustomForward.
  /// @throws c10::Error if forward() constructed no CustomForward for this device type.
  [[nodiscard]] CustomBackward(torch::autograd::AutogradContext* ctx, c10::DeviceType device_type);

 private:
  AutocastGuard guard_;
};

}  // namespace torchfuse::amp
