// SPDX-License-Identifier: BSD-3-Clause
// LARS: the public function behind the op.
#include <torchfuse/ops.h>

#include "kernels/functors/lars.h"
#include "ops/fused_step/functional_step.h"

namespace torchfuse {

void fused_lars_(at::TensorList params, at::TensorList grads, at::TensorList momentum_buffers,
                 at::TensorList state_steps, at::TensorList master_params, double lr,
                 double momentum, double weight_decay, double trust_coefficient, double eps,
                 bool nesterov, bool maximize, const std::optional<at::Tensor>& lr_tensor,
                 const std::optional<at::Tensor>& grad_scale,
                 const std::optional<at::Tensor>& found_inf) {
  ops::call_op<fused_lars_>("torchfuse::fused_lars_", params, grads, momentum_buffers, state_steps,
                            master_params, lr, momentum, weight_decay, trust_coefficient, eps,
                            nesterov, maximize, lr_tensor, grad_scale, found_inf);
}

TORCHFUSE_REGISTER_FUSED_OPTIMIZER(lars, Lars);

}  // namespace torchfuse
