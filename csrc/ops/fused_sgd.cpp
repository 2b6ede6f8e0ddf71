// SPDX-License-Identifier: BSD-3-Clause
// SGD: hyper-parameters, and the functional op over the common step.
#include <torchfuse/ops.h>

#include "kernels/functors/sgd.h"
#include "ops/algorithm.h"
#include "ops/functional_step.h"

namespace torchfuse {

namespace {

class SgdAlgorithm final : public ops::FusedAlgorithm<kernels::Sgd> {
 public:
  const char* op() const override { return "fused_sgd_"; }

  const std::vector<std::string>& hyper_param_names() const override {
    static const std::vector<std::string> names{
        "lr", "momentum", "dampening", "weight_decay", "nesterov", "wd_after_momentum", "maximize"};
    return names;
  }

  const std::vector<std::string>& state_names() const override {
    static const std::vector<std::string> names{"momentum_buffer"};
    return names;
  }

 protected:
  kernels::SgdParams read(ops::GroupReader& reader) const override {
    kernels::SgdParams params;
    params.lr = reader.number(0.0);
    params.momentum = reader.number(0.0);
    params.dampening = reader.number(0.0);
    params.weight_decay = reader.number(0.0);
    params.nesterov = reader.flag();
    params.wd_after_momentum = reader.flag();
    params.maximize = reader.flag();
    return params;
  }
};

const bool kSgdIsRegistered =
    ops::register_algorithm("sgd", [] { return std::make_unique<SgdAlgorithm>(); });

void fused_sgd_impl(at::TensorList params, at::TensorList grads, at::TensorList momentum_buffers,
                    at::TensorList state_steps, at::TensorList master_params, double lr,
                    double momentum, double dampening, double weight_decay, bool nesterov,
                    bool wd_after_momentum, bool maximize,
                    const std::optional<at::Tensor>& lr_tensor,
                    const std::optional<at::Tensor>& grad_scale,
                    const std::optional<at::Tensor>& found_inf) {
  ops::FunctionalStep step(std::make_unique<SgdAlgorithm>(), params, grads);
  step.add_state(momentum_buffers, /*optional=*/momentum == 0.0);
  step.set_steps(state_steps);
  step.set_masters(master_params);
  step.run({ops::tensor_or(lr_tensor, lr), momentum, dampening, weight_decay, ops::flag(nesterov),
            ops::flag(wd_after_momentum), ops::flag(maximize)},
           grad_scale, found_inf);
}

}  // namespace

void fused_sgd_(at::TensorList params, at::TensorList grads, at::TensorList momentum_buffers,
                at::TensorList state_steps, at::TensorList master_params, double lr,
                double momentum, double dampening, double weight_decay, bool nesterov,
                bool wd_after_momentum, bool maximize, const std::optional<at::Tensor>& lr_tensor,
                const std::optional<at::Tensor>& grad_scale,
                const std::optional<at::Tensor>& found_inf) {
  ops::call_step_op<fused_sgd_impl>("torchfuse::fused_sgd_", params, grads, momentum_buffers,
                                    state_steps, master_params, lr, momentum, dampening,
                                    weight_decay, nesterov, wd_after_momentum, maximize, lr_tensor,
                                    grad_scale, found_inf);
}

TORCHFUSE_REGISTER_STEP_OP("fused_sgd_", fused_sgd_impl);

}  // namespace torchfuse
