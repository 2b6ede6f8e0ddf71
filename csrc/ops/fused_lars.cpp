// SPDX-License-Identifier: BSD-3-Clause
// LARS: hyper-parameters, and the functional op over the common step.
#include <torchfuse/ops.h>

#include "kernels/functors/lars.h"
#include "ops/algorithm.h"
#include "ops/functional_step.h"

namespace torchfuse {

namespace {

class LarsAlgorithm final : public ops::FusedAlgorithm<kernels::Lars> {
 public:
  const char* op() const override { return "fused_lars_"; }

  const std::vector<std::string>& hyper_param_names() const override {
    static const std::vector<std::string> names{
        "lr", "momentum", "weight_decay", "trust_coefficient", "eps", "nesterov", "maximize"};
    return names;
  }

  const std::vector<std::string>& state_names() const override {
    static const std::vector<std::string> names{"momentum_buffer"};
    return names;
  }

 protected:
  kernels::LarsParams read(ops::GroupReader& reader) const override {
    kernels::LarsParams params;
    params.lr = reader.number(0.0);
    params.momentum = reader.number(0.0);
    params.weight_decay = reader.number(0.0);
    params.trust_coefficient = reader.number(0.0);
    params.eps = reader.number(0.0);
    params.nesterov = reader.flag();
    params.maximize = reader.flag();
    return params;
  }
};

const bool kLarsIsRegistered =
    ops::register_algorithm("lars", [] { return std::make_unique<LarsAlgorithm>(); });

void fused_lars_impl(at::TensorList params, at::TensorList grads, at::TensorList momentum_buffers,
                     at::TensorList state_steps, at::TensorList master_params, double lr,
                     double momentum, double weight_decay, double trust_coefficient, double eps,
                     bool nesterov, bool maximize, const std::optional<at::Tensor>& lr_tensor,
                     const std::optional<at::Tensor>& grad_scale,
                     const std::optional<at::Tensor>& found_inf) {
  ops::FunctionalStep step(std::make_unique<LarsAlgorithm>(), params, grads);
  step.add_state(momentum_buffers);
  step.set_steps(state_steps);
  step.set_masters(master_params);
  step.run({ops::tensor_or(lr_tensor, lr), momentum, weight_decay, trust_coefficient, eps,
            ops::flag(nesterov), ops::flag(maximize)},
           grad_scale, found_inf);
}

}  // namespace

void fused_lars_(at::TensorList params, at::TensorList grads, at::TensorList momentum_buffers,
                 at::TensorList state_steps, at::TensorList master_params, double lr,
                 double momentum, double weight_decay, double trust_coefficient, double eps,
                 bool nesterov, bool maximize, const std::optional<at::Tensor>& lr_tensor,
                 const std::optional<at::Tensor>& grad_scale,
                 const std::optional<at::Tensor>& found_inf) {
  ops::call_step_op<fused_lars_impl>("torchfuse::fused_lars_", params, grads, momentum_buffers,
                                     state_steps, master_params, lr, momentum, weight_decay,
                                     trust_coefficient, eps, nesterov, maximize, lr_tensor,
                                     grad_scale, found_inf);
}

TORCHFUSE_REGISTER_STEP_OP("fused_lars_", fused_lars_impl);

}  // namespace torchfuse
