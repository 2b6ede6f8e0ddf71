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

/// How the forward of an autograd function of your own runs under autocast: the C++ counterpart of
/// torch.amp.custom_fwd. Make one at the start of forward(), and a CustomBackward at the start of
/// backward().
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
/// Without `cast_inputs` the function runs in the state of its caller. With it, and where autocast
/// is on, forward runs with autocast off, on inputs that it has put through cast(). Where autocast
/// is off, neither has an effect.
class TORCHFUSE_API CustomForward {
 public:
  /// @param ctx of forward(); holds the state for backward().
  /// @param device_type kCPU or kCUDA.
  /// @param cast_inputs a floating-point type for cast(), or none.
  /// @throws c10::Error for another device type or another kind of type.
  [[nodiscard]] CustomForward(torch::autograd::AutogradContext* ctx, c10::DeviceType device_type,
                              std::optional<c10::ScalarType> cast_inputs = std::nullopt);

  /// The tensor in the type `cast_inputs`, where that is asked for and autocast was on: if it is of
  /// floating point, but not fp64, and on a device of that type. Otherwise the tensor itself. The
  /// gradient comes back in the tensor's own type.
  at::Tensor cast(const at::Tensor& tensor) const;
  /// Each of them.
  std::vector<at::Tensor> cast(const std::vector<at::Tensor>& tensors) const;
  /// If there is one.
  std::optional<at::Tensor> cast(const std::optional<at::Tensor>& tensor) const;

 private:
  c10::DeviceType device_type_;
  std::optional<c10::ScalarType> cast_to_;  ///< none: inputs stay as they are
  std::optional<AutocastGuard> island_;
};

/// Puts backward() into the state of autocast that forward() had, on whichever of autograd's
/// threads it runs: the counterpart of torch.amp.custom_bwd. See CustomForward.
class TORCHFUSE_API CustomBackward {
 public:
  /// @param ctx of backward().
  /// @param device_type that of the forward.
  /// @throws c10::Error if forward() made no CustomForward for this device type.
  [[nodiscard]] CustomBackward(torch::autograd::AutogradContext* ctx, c10::DeviceType device_type);

 private:
  AutocastGuard guard_;
};

}  // namespace torchfuse::amp
