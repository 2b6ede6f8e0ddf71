// SPDX-License-Identifier: BSD-3-Clause
// LAMB: hyper-parameters, and the functional op over the common step.
#include <torchfuse/ops.h>

#include <limits>

#include "kernels/functors/lamb.h"
#include "ops/algorithm.h"
#include "ops/functional_step.h"

namespace torchfuse {

namespace {

class LambAlgorithm final : public ops::FusedAlgorithm<kernels::Lamb> {
 public:
  const char* op() const override { return "fused_lamb_"; }

  const std::vector<std::string>& hyper_param_names() const override {
    static const std::vector<std::string> names{
        "lr",           "beta1",           "beta2",           "eps",
        "weight_decay", "min_trust_ratio", "max_trust_ratio", "bias_correction",
        "adam_w_mode",  "grad_averaging",  "use_nvlamb",      "maximize"};
    return names;
  }

  const std::vector<std::string>& state_names() const override {
    static const std::vector<std::string> names{"exp_avg", "exp_avg_sq"};
    return names;
  }

 protected:
  kernels::LambParams read(ops::GroupReader& reader) const override {
    kernels::LambParams params;
    params.lr = reader.number(0.0);
    params.beta1 = reader.number(0.0, 1.0);
    params.beta2 = reader.number(0.0, 1.0);
    params.eps = reader.number(0.0);
    params.weight_decay = reader.number(0.0);
    params.min_trust_ratio = reader.number(0.0);
    params.max_trust_ratio = reader.bound(0.0);
    reader.check_order(params.min_trust_ratio, params.max_trust_ratio);
    params.bias_correction = reader.flag();
    params.adam_w_mode = reader.flag();
    params.grad_averaging = reader.flag();
    params.use_nvlamb = reader.flag();
    params.maximize = reader.flag();
    return params;
  }
};

const bool kLambIsRegistered =
    ops::register_algorithm("lamb", [] { return std::make_unique<LambAlgorithm>(); });

void fused_lamb_impl(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
                     at::TensorList exp_avg_sqs, at::TensorList state_steps,
                     at::TensorList master_params, double lr, double beta1, double beta2,
                     double weight_decay, double eps, double min_trust_ratio,
                     std::optional<double> max_trust_ratio, bool bias_correction, bool adam_w_mode,
                     bool grad_averaging, bool use_nvlamb, bool maximize,
                     const std::optional<at::Tensor>& lr_tensor,
                     const std::optional<at::Tensor>& grad_scale,
                     const std::optional<at::Tensor>& found_inf) {
  ops::FunctionalStep step(std::make_unique<LambAlgorithm>(), params, grads);
  step.add_state(exp_avgs);
  step.add_state(exp_avg_sqs);
  step.set_steps(state_steps);
  step.set_masters(master_params);
  step.run({ops::tensor_or(lr_tensor, lr), beta1, beta2, eps, weight_decay, min_trust_ratio,
            max_trust_ratio.value_or(std::numeric_limits<double>::infinity()),
            ops::flag(bias_correction), ops::flag(adam_w_mode), ops::flag(grad_averaging),
            ops::flag(use_nvlamb), ops::flag(maximize)},
           grad_scale, found_inf);
}

}  // namespace

void fused_lamb_(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
                 at::TensorList exp_avg_sqs, at::TensorList state_steps,
                 at::TensorList master_params, double lr, double beta1, double beta2,
                 double weight_decay, double eps, double min_trust_ratio,
                 std::optional<double> max_trust_ratio, bool bias_correction, bool adam_w_mode,
                 bool grad_averaging, bool use_nvlamb, bool maximize,
                 const std::optional<at::Tensor>& lr_tensor,
                 const std::optional<at::Tensor>& grad_scale,
                 const std::optional<at::Tensor>& found_inf) {
  ops::call_step_op<fused_lamb_impl>(
      "torchfuse::fused_lamb_", params, grads, exp_avgs, exp_avg_sqs, state_steps, master_params,
      lr, beta1, beta2, weight_decay, eps, min_trust_ratio, max_trust_ratio, bias_correction,
      adam_w_mode, grad_averaging, use_nvlamb, maximize, lr_tensor, grad_scale, found_inf);
}

TORCHFUSE_REGISTER_STEP_OP("fused_lamb_", fused_lamb_impl);

}  // namespace torchfuse
