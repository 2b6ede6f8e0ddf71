// SPDX-License-Identifier: BSD-3-Clause
// Lion: hyper-parameters, and the functional op over the common step.
#include <torchfuse/ops.h>

#include "kernels/functors/lion.h"
#include "ops/algorithm.h"
#include "ops/functional_step.h"

namespace torchfuse {

namespace {

class LionAlgorithm final : public ops::FusedAlgorithm<kernels::Lion> {
 public:
  const char* op() const override { return "fused_lion_"; }

  const std::vector<std::string>& hyper_param_names() const override {
    static const std::vector<std::string> names{"lr", "beta1", "beta2", "weight_decay", "maximize"};
    return names;
  }

  const std::vector<std::string>& state_names() const override {
    static const std::vector<std::string> names{"exp_avg"};
    return names;
  }

 protected:
  kernels::LionParams read(ops::GroupReader& reader) const override {
    kernels::LionParams params;
    params.lr = reader.number(0.0);
    params.beta1 = reader.number(0.0, 1.0);
    params.beta2 = reader.number(0.0, 1.0);
    params.weight_decay = reader.number(0.0);
    params.maximize = reader.flag();
    return params;
  }
};

const bool kLionIsRegistered =
    ops::register_algorithm("lion", [] { return std::make_unique<LionAlgorithm>(); });

void fused_lion_impl(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
                     at::TensorList state_steps, at::TensorList master_params, double lr,
                     double beta1, double beta2, double weight_decay, bool maximize,
                     const std::optional<at::Tensor>& lr_tensor,
                     const std::optional<at::Tensor>& grad_scale,
                     const std::optional<at::Tensor>& found_inf) {
  ops::FunctionalStep step(std::make_unique<LionAlgorithm>(), params, grads);
  step.add_state(exp_avgs);
  step.set_steps(state_steps);
  step.set_masters(master_params);
  step.run({ops::tensor_or(lr_tensor, lr), beta1, beta2, weight_decay, ops::flag(maximize)},
           grad_scale, found_inf);
}

}  // namespace

void fused_lion_(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
                 at::TensorList state_steps, at::TensorList master_params, double lr, double beta1,
                 double beta2, double weight_decay, bool maximize,
                 const std::optional<at::Tensor>& lr_tensor,
                 const std::optional<at::Tensor>& grad_scale,
                 const std::optional<at::Tensor>& found_inf) {
  ops::call_step_op<fused_lion_impl>("torchfuse::fused_lion_", params, grads, exp_avgs, state_steps,
                                     master_params, lr, beta1, beta2, weight_decay, maximize,
                                     lr_tensor, grad_scale, found_inf);
}

TORCHFUSE_REGISTER_STEP_OP("fused_lion_", fused_lion_impl);

}  // namespace torchfuse
