// SPDX-License-Identifier: BSD-3-Clause
// NovoGrad: hyper-parameters, and the functional op over the common step.
#include <torchfuse/ops.h>

#include "kernels/functors/novograd.h"
#include "ops/algorithm.h"
#include "ops/functional_step.h"

namespace torchfuse {

namespace {

class NovoGradAlgorithm final : public ops::FusedAlgorithm<kernels::NovoGrad> {
 public:
  const char* op() const override { return "fused_novograd_"; }

  const std::vector<std::string>& hyper_param_names() const override {
    static const std::vector<std::string> names{
        "lr",           "beta1",           "beta2",          "eps",
        "weight_decay", "bias_correction", "grad_averaging", "reg_inside_moment",
        "inf_norm",     "init_zero",       "maximize"};
    return names;
  }

  const std::vector<std::string>& state_names() const override {
    static const std::vector<std::string> names{"exp_avg", "exp_avg_norm"};
    return names;
  }

 protected:
  kernels::NovoGradParams read(ops::GroupReader& reader) const override {
    kernels::NovoGradParams params;
    params.lr = reader.number(0.0);
    params.beta1 = reader.number(0.0, 1.0);
    params.beta2 = reader.number(0.0, 1.0);
    params.eps = reader.number(0.0);
    params.weight_decay = reader.number(0.0);
    params.bias_correction = reader.flag();
    params.grad_averaging = reader.flag();
    params.reg_inside_moment = reader.flag();
    params.inf_norm = reader.flag();
    params.init_zero = reader.flag();
    params.maximize = reader.flag();
    return params;
  }
};

const bool kNovogradIsRegistered =
    ops::register_algorithm("novograd", [] { return std::make_unique<NovoGradAlgorithm>(); });

void fused_novograd_impl(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
                         at::TensorList exp_avg_norms, at::TensorList state_steps,
                         at::TensorList master_params, double lr, double beta1, double beta2,
                         double weight_decay, double eps, bool bias_correction, bool grad_averaging,
                         bool reg_inside_moment, bool inf_norm, bool init_zero, bool maximize,
                         const std::optional<at::Tensor>& lr_tensor,
                         const std::optional<at::Tensor>& grad_scale,
                         const std::optional<at::Tensor>& found_inf) {
  ops::FunctionalStep step(std::make_unique<NovoGradAlgorithm>(), params, grads);
  step.add_state(exp_avgs);
  step.add_state(exp_avg_norms);
  step.set_steps(state_steps);
  step.set_masters(master_params);
  step.run({ops::tensor_or(lr_tensor, lr), beta1, beta2, eps, weight_decay,
            ops::flag(bias_correction), ops::flag(grad_averaging), ops::flag(reg_inside_moment),
            ops::flag(inf_norm), ops::flag(init_zero), ops::flag(maximize)},
           grad_scale, found_inf);
}

}  // namespace

void fused_novograd_(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
                     at::TensorList exp_avg_norms, at::TensorList state_steps,
                     at::TensorList master_params, double lr, double beta1, double beta2,
                     double weight_decay, double eps, bool bias_correction, bool grad_averaging,
                     bool reg_inside_moment, bool inf_norm, bool init_zero, bool maximize,
                     const std::optional<at::Tensor>& lr_tensor,
                     const std::optional<at::Tensor>& grad_scale,
                     const std::optional<at::Tensor>& found_inf) {
  ops::call_step_op<fused_novograd_impl>(
      "torchfuse::fused_novograd_", params, grads, exp_avgs, exp_avg_norms, state_steps,
      master_params, lr, beta1, beta2, weight_decay, eps, bias_correction, grad_averaging,
      reg_inside_moment, inf_norm, init_zero, maximize, lr_tensor, grad_scale, found_inf);
}

TORCHFUSE_REGISTER_STEP_OP("fused_novograd_", fused_novograd_impl);

}  // namespace torchfuse
