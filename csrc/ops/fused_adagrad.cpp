// SPDX-License-Identifier: BSD-3-Clause
// Adagrad: hyper-parameters, and the functional op over the common step.
#include <torchfuse/ops.h>

#include "kernels/functors/adagrad.h"
#include "ops/algorithm.h"
#include "ops/functional_step.h"

namespace torchfuse {

namespace {

class AdagradAlgorithm final : public ops::FusedAlgorithm<kernels::Adagrad> {
 public:
  const char* op() const override { return "fused_adagrad_"; }

  const std::vector<std::string>& hyper_param_names() const override {
    static const std::vector<std::string> names{"lr",           "lr_decay",       "eps",
                                                "weight_decay", "adagrad_w_mode", "maximize"};
    return names;
  }

  const std::vector<std::string>& state_names() const override {
    static const std::vector<std::string> names{"sum"};
    return names;
  }

 protected:
  kernels::AdagradParams read(ops::GroupReader& reader) const override {
    kernels::AdagradParams params;
    params.lr = reader.number(0.0);
    params.lr_decay = reader.number(0.0);
    params.eps = reader.number(0.0);
    params.weight_decay = reader.number(0.0);
    params.adagrad_w_mode = reader.flag();
    params.maximize = reader.flag();
    return params;
  }
};

const bool kAdagradIsRegistered =
    ops::register_algorithm("adagrad", [] { return std::make_unique<AdagradAlgorithm>(); });

void fused_adagrad_impl(at::TensorList params, at::TensorList grads, at::TensorList sums,
                        at::TensorList state_steps, at::TensorList master_params, double lr,
                        double lr_decay, double eps, double weight_decay, bool adagrad_w_mode,
                        bool maximize, const std::optional<at::Tensor>& lr_tensor,
                        const std::optional<at::Tensor>& grad_scale,
                        const std::optional<at::Tensor>& found_inf) {
  ops::FunctionalStep step(std::make_unique<AdagradAlgorithm>(), params, grads);
  step.add_state(sums);
  step.set_steps(state_steps);
  step.set_masters(master_params);
  step.run({ops::tensor_or(lr_tensor, lr), lr_decay, eps, weight_decay, ops::flag(adagrad_w_mode),
            ops::flag(maximize)},
           grad_scale, found_inf);
}

}  // namespace

void fused_adagrad_(at::TensorList params, at::TensorList grads, at::TensorList sums,
                    at::TensorList state_steps, at::TensorList master_params, double lr,
                    double lr_decay, double eps, double weight_decay, bool adagrad_w_mode,
                    bool maximize, const std::optional<at::Tensor>& lr_tensor,
                    const std::optional<at::Tensor>& grad_scale,
                    const std::optional<at::Tensor>& found_inf) {
  ops::call_step_op<fused_adagrad_impl>("torchfuse::fused_adagrad_", params, grads, sums,
                                        state_steps, master_params, lr, lr_decay, eps, weight_decay,
                                        adagrad_w_mode, maximize, lr_tensor, grad_scale, found_inf);
}

TORCHFUSE_REGISTER_STEP_OP("fused_adagrad_", fused_adagrad_impl);

}  // namespace torchfuse
