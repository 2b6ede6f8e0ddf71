// SPDX-License-Identifier: BSD-3-Clause
// NovoGrad: the public function behind the op.
#include <torchfuse/ops.h>

#include "kernels/functors/novograd.h"
#include "ops/fused_step/functional_step.h"

namespace torchfuse {

void fused_novograd_(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
                     at::TensorList exp_avg_norms, at::TensorList state_steps,
                     at::TensorList master_params, double lr, double beta1, double beta2,
                     double weight_decay, double eps, bool bias_correction, bool grad_averaging,
                     bool reg_inside_moment, bool inf_norm, bool init_zero, bool maximize,
                     const std::optional<at::Tensor>& lr_tensor,
                     const std::optional<at::Tensor>& grad_scale,
                     const std::optional<at::Tensor>& found_inf) {
  ops::call_op<fused_novograd_>(
      "torchfuse::fused_novograd_", params, grads, exp_avgs, exp_avg_norms, state_steps,
      master_params, lr, beta1, beta2, weight_decay, eps, bias_correction, grad_averaging,
      reg_inside_moment, inf_norm, init_zero, maximize, lr_tensor, grad_scale, found_inf);
}

TORCHFUSE_REGISTER_FUSED_OPTIMIZER(novograd, NovoGrad);

}  // namespace torchfuse
