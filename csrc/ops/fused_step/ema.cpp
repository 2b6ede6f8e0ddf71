// SPDX-License-Identifier: BSD-3-Clause
#include <torchfuse/ema.h>

#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include "ops/check.h"

namespace torchfuse {

namespace {

/// Checks in advance what copy_() would reject only after another tensor has been written.
void check_receives(const ops::Argument& argument, const at::Tensor& tensor) {
  if (tensor.is_inference() && !c10::InferenceMode::is_enabled()) {
    ops::fail(argument, "be a tensor that can be written", "one made in inference mode",
              "Create or clone the tensor outside inference mode.");
  }
  if (ops::overlaps_itself(tensor) || !ops::within_storage(*tensor.unsafeGetTensorImpl())) {
    ops::fail(argument, "have memory for each of its elements", "a tensor without memory for some",
              "Clone an expanded tensor. Resize a resized storage back.");
  }
}

}  // namespace

// All checks precede the first copy, because an incomplete exchange would lose the parameter.
at::Tensor swap_ema_(const at::Tensor& param, const at::Tensor& ema, const at::Tensor& kept) {
  constexpr const char* kName = "swap_ema_";
  const at::NoGradGuard no_grad;
  TORCH_CHECK(at::isFloatingType(param.scalar_type()), kName,
              ": expected param to be a floating-point tensor, got ", param.scalar_type(), ".");
  const at::ScalarType dtype = param.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  TORCH_CHECK(ema.defined() && ema.scalar_type() == dtype, kName, ": expected ema to be of dtype ",
              dtype, " for a ", param.scalar_type(), " parameter, got ",
              ema.defined() ? c10::toString(ema.scalar_type()) : "an undefined tensor", ".");
  ops::check_same_sizes({kName, "ema"}, ema, param, "param");
  check_receives({kName, "param"}, param);
  if (kept.defined()) {
    ops::check_same_sizes({kName, "kept"}, kept, param, "param");
    TORCH_CHECK(kept.scalar_type() == param.scalar_type(), kName,
                ": expected param to be of dtype ", kept.scalar_type(),
                ", as before the swap, got ", param.scalar_type(), ". Convert it back first.");
    param.copy_(kept);
    at::autocast::clear_cache();  // autocast caches casts of the former values
    return {};
  }
  if (dtype == param.scalar_type()) check_receives({kName, "ema"}, ema);
  at::Tensor before = param.detach().clone();
  param.copy_(ema);
  at::autocast::clear_cache();
  if (dtype != param.scalar_type()) return before;
  ema.copy_(before);
  return {};
}

}  // namespace torchfuse
