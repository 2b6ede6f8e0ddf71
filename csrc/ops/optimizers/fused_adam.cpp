// SPDX-License-Identifier: BSD-3-Clause
// Adam and AdamW: the public function behind the op.
#include <torchfuse/ops.h>

#include "kernels/functors/adam.h"
#include "ops/fused_step/functional_step.h"

namespace torchfuse {

void fused_adam_(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
                 at::TensorList exp_avg_sqs, at::TensorList max_exp_avg_sqs,
                 at::TensorList state_steps, at::TensorList master_params, double lr, double beta1,
                 double beta2, double weight_decay, double eps, bool amsgrad, bool maximize,
                 bool adam_w_mode, bool bias_correction, const std::optional<at::Tensor>& lr_tensor,
                 const std::optional<at::Tensor>& grad_scale,
                 const std::optional<at::Tensor>& found_inf) {
  ops::call_op<fused_adam_>("torchfuse::fused_adam_", params, grads, exp_avgs, exp_avg_sqs,
                            max_exp_avg_sqs, state_steps, master_params, lr, beta1, beta2,
                            weight_decay, eps, amsgrad, maximize, adam_w_mode, bias_correction,
                            lr_tensor, grad_scale, found_inf);
}

TORCHFUSE_REGISTER_FUSED_OPTIMIZER(adam, Adam);

}  // namespace torchfuse
