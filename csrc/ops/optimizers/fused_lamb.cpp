// SPDX-License-Identifier: BSD-3-Clause
// LAMB: the public function behind the op.
#include <torchfuse/ops.h>

#include "kernels/functors/lamb.h"
#include "ops/fused_step/functional_step.h"

namespace torchfuse {

void fused_lamb_(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
                 at::TensorList exp_avg_sqs, at::TensorList state_steps,
                 at::TensorList master_params, double lr, double beta1, double beta2,
                 double weight_decay, double eps, double min_trust_ratio,
                 std::optional<double> max_trust_ratio, bool bias_correction, bool adam_w_mode,
                 bool grad_averaging, bool use_nvlamb, bool maximize,
                 const std::optional<at::Tensor>& lr_tensor,
                 const std::optional<at::Tensor>& grad_scale,
                 const std::optional<at::Tensor>& found_inf) {
  ops::call_op<fused_lamb_>("torchfuse::fused_lamb_", params, grads, exp_avgs, exp_avg_sqs,
                            state_steps, master_params, lr, beta1, beta2, weight_decay, eps,
                            min_trust_ratio, max_trust_ratio, bias_correction, adam_w_mode,
                            grad_averaging, use_nvlamb, maximize, lr_tensor, grad_scale, found_inf);
}

TORCHFUSE_REGISTER_FUSED_OPTIMIZER(lamb, Lamb);

}  // namespace torchfuse
