// SPDX-License-Identifier: BSD-3-Clause
// SGD: the public function behind the op.
#include <torchfuse/ops.h>

#include "kernels/functors/sgd.h"
#include "ops/fused_step/functional_step.h"

namespace torchfuse {

void fused_sgd_(at::TensorList params, at::TensorList grads, at::TensorList momentum_buffers,
                at::TensorList state_steps, at::TensorList master_params, double lr,
                double momentum, double dampening, double weight_decay, bool nesterov,
                bool wd_after_momentum, bool maximize, const std::optional<at::Tensor>& lr_tensor,
                const std::optional<at::Tensor>& grad_scale,
                const std::optional<at::Tensor>& found_inf) {
  ops::call_op<fused_sgd_>("torchfuse::fused_sgd_", params, grads, momentum_buffers, state_steps,
                           master_params, lr, momentum, dampening, weight_decay, nesterov,
                           wd_after_momentum, maximize, lr_tensor, grad_scale, found_inf);
}

TORCHFUSE_REGISTER_FUSED_OPTIMIZER(sgd, Sgd);

}  // namespace torchfuse
