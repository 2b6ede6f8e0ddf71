// SPDX-License-Identifier: BSD-3-Clause
// Adam and AdamW: hyper-parameters, and the functional op over the common step.
#include <torchfuse/ops.h>

#include "kernels/functors/adam.h"
#include "ops/algorithm.h"
#include "ops/functional_step.h"

namespace torchfuse {

namespace {

class AdamAlgorithm final : public ops::FusedAlgorithm<kernels::Adam> {
 public:
  const char* op() const override { return "fused_adam_"; }

  const std::vector<std::string>& hyper_param_names() const override {
    static const std::vector<std::string> names{"lr",          "beta1",        "beta2",
                                                "eps",         "weight_decay", "bias_correction",
                                                "adam_w_mode", "amsgrad",      "maximize"};
    return names;
  }

  const std::vector<std::string>& state_names() const override {
    static const std::vector<std::string> names{"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
    return names;
  }

 protected:
  kernels::AdamParams read(ops::GroupReader& reader) const override {
    kernels::AdamParams params;
    params.lr = reader.number(0.0);
    params.beta1 = reader.number(0.0, 1.0);
    params.beta2 = reader.number(0.0, 1.0);
    params.eps = reader.number(0.0);
    params.weight_decay = reader.number(0.0);
    params.bias_correction = reader.flag();
    params.adam_w_mode = reader.flag();
    params.amsgrad = reader.flag();
    params.maximize = reader.flag();
    return params;
  }
};

const bool kAdamIsRegistered =
    ops::register_algorithm("adam", [] { return std::make_unique<AdamAlgorithm>(); });

void fused_adam_impl(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
                     at::TensorList exp_avg_sqs, at::TensorList max_exp_avg_sqs,
                     at::TensorList state_steps, at::TensorList master_params, double lr,
                     double beta1, double beta2, double weight_decay, double eps, bool amsgrad,
                     bool maximize, bool adam_w_mode, bool bias_correction,
                     const std::optional<at::Tensor>& lr_tensor,
                     const std::optional<at::Tensor>& grad_scale,
                     const std::optional<at::Tensor>& found_inf) {
  ops::FunctionalStep step(std::make_unique<AdamAlgorithm>(), params, grads);
  step.add_state(exp_avgs);
  step.add_state(exp_avg_sqs);
  step.add_state(max_exp_avg_sqs, /*optional=*/!amsgrad);
  step.set_steps(state_steps);
  step.set_masters(master_params);
  step.run(
      {ops::tensor_or(lr_tensor, lr), beta1, beta2, eps, weight_decay, ops::flag(bias_correction),
       ops::flag(adam_w_mode), ops::flag(amsgrad), ops::flag(maximize)},
      grad_scale, found_inf);
}

}  // namespace

void fused_adam_(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
                 at::TensorList exp_avg_sqs, at::TensorList max_exp_avg_sqs,
                 at::TensorList state_steps, at::TensorList master_params, double lr, double beta1,
                 double beta2, double weight_decay, double eps, bool amsgrad, bool maximize,
                 bool adam_w_mode, bool bias_correction, const std::optional<at::Tensor>& lr_tensor,
                 const std::optional<at::Tensor>& grad_scale,
                 const std::optional<at::Tensor>& found_inf) {
  ops::call_step_op<fused_adam_impl>("torchfuse::fused_adam_", params, grads, exp_avgs, exp_avg_sqs,
                                     max_exp_avg_sqs, state_steps, master_params, lr, beta1, beta2,
                                     weight_decay, eps, amsgrad, maximize, adam_w_mode,
                                     bias_correction, lr_tensor, grad_scale, found_inf);
}

TORCHFUSE_REGISTER_STEP_OP("fused_adam_", fused_adam_impl);

}  // namespace torchfuse
