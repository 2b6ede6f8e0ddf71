// SPDX-License-Identifier: BSD-3-Clause
// Lion: the public function behind the op.
#include <torchfuse/ops.h>

#include "kernels/functors/lion.h"
#include "ops/fused_step/functional_step.h"

namespace torchfuse {

void fused_lion_(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
                 at::TensorList state_steps, at::TensorList master_params, double lr, double beta1,
                 double beta2, double weight_decay, bool maximize,
                 const std::optional<at::Tensor>& lr_tensor,
                 const std::optional<at::Tensor>& grad_scale,
                 const std::optional<at::Tensor>& found_inf) {
  ops::call_op<fused_lion_>("torchfuse::fused_lion_", params, grads, exp_avgs, state_steps,
                            master_params, lr, beta1, beta2, weight_decay, maximize, lr_tensor,
                            grad_scale, found_inf);
}

TORCHFUSE_REGISTER_FUSED_OPTIMIZER(lion, Lion);

}  // namespace torchfuse
