// SPDX-License-Identifier: BSD-3-Clause
// Adagrad: the public function behind the op.
#include <torchfuse/ops.h>

#include "kernels/functors/adagrad.h"
#include "ops/fused_step/functional_step.h"

namespace torchfuse {

void fused_adagrad_(at::TensorList params, at::TensorList grads, at::TensorList sums,
                    at::TensorList state_steps, at::TensorList master_params, double lr,
                    double lr_decay, double eps, double weight_decay, bool adagrad_w_mode,
                    bool maximize, const std::optional<at::Tensor>& lr_tensor,
                    const std::optional<at::Tensor>& grad_scale,
                    const std::optional<at::Tensor>& found_inf) {
  ops::call_op<fused_adagrad_>("torchfuse::fused_adagrad_", params, grads, sums, state_steps,
                               master_params, lr, lr_decay, eps, weight_decay, adagrad_w_mode,
                               maximize, lr_tensor, grad_scale, found_inf);
}

TORCHFUSE_REGISTER_FUSED_OPTIMIZER(adagrad, Adagrad);

}  // namespace torchfuse
