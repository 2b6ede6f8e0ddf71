// SPDX-License-Identifier: BSD-3-Clause
// FusedNovoGrad: what is particular to its options and states.
#include <torchfuse/optim/fused_novograd.h>

#include "api/optim/fused_class_step.h"

namespace torchfuse::optim {

template <>
struct FusedClass<FusedNovoGradOptions> {
  static constexpr const char* kName = "FusedNovoGrad";
  static constexpr const char* kAlgorithm = "novograd";
  static constexpr std::size_t kRequired = 2;
  static constexpr std::size_t kTensorStates = 1;

  template <class Self, class Visit>
  static void options(Self& options, const Visit& visit) {
    visit("lr", options.lr());
    visit("betas", options.betas());
    visit("eps", options.eps());
    visit("weight_decay", options.weight_decay());
    visit("bias_correction", options.bias_correction());
    visit("reg_inside_moment", options.reg_inside_moment());
    visit("grad_averaging", options.grad_averaging());
    visit("norm_type", options.norm_type());
    visit("init_zero", options.init_zero());
    visit("maximize", options.maximize());
    visit("master_weights", options.master_weights());
    visit("max_grad_norm", options.max_grad_norm());
    visit("write_back_grads", options.write_back_grads());
    visit("skip_non_finite", options.skip_non_finite());
  }

  template <class Self, class Visit>
  static void states(Self& state, const Visit& visit) {
    visit("exp_avg", state.exp_avg());
    visit("exp_avg_norm", state.exp_avg_norm());
  }

  static bool uses_state(const FusedNovoGradOptions& /*options*/, std::size_t /*index*/) {
    return true;
  }

  static std::vector<HyperParam> hyper_params(const FusedNovoGradOptions& options) {
    return {options.lr(),
            std::get<0>(options.betas()),
            std::get<1>(options.betas()),
            options.eps(),
            options.weight_decay(),
            static_cast<double>(options.bias_correction()),
            static_cast<double>(options.grad_averaging()),
            static_cast<double>(options.reg_inside_moment()),
            static_cast<double>(options.norm_type() == 0),
            static_cast<double>(options.init_zero()),
            static_cast<double>(options.maximize())};
  }
};

template class FusedOptimizerOf<FusedNovoGradOptions, FusedNovoGradParamState>;

FusedNovoGradOptions::FusedNovoGradOptions(double lr) : lr_(lr) {}

void FusedNovoGradOptions::check(const std::string& owner) const {
  constexpr const char* kName = FusedClass<FusedNovoGradOptions>::kName;
  check_non_negative(kName, owner, "lr", lr());
  check_below_one(kName, owner, "betas[0]", std::get<0>(betas()));
  check_below_one(kName, owner, "betas[1]", std::get<1>(betas()));
  check_non_negative(kName, owner, "eps", eps());
  check_non_negative(kName, owner, "weight_decay", weight_decay());
  TORCH_CHECK_VALUE(norm_type() == 0 || norm_type() == 2, kName, ": expected ", owner,
                    ".norm_type to be 2 or 0 (the largest magnitude), got ", norm_type(), ".");
  check_max_grad_norm(kName, owner, max_grad_norm());
}

void FusedNovoGradOptions::serialize(torch::serialize::InputArchive& archive) {
  read_options(archive, *this);
}
void FusedNovoGradOptions::serialize(torch::serialize::OutputArchive& archive) const {
  write_options(archive, *this);
}
double FusedNovoGradOptions::get_lr() const { return lr(); }
void FusedNovoGradOptions::set_lr(double lr) {
  check_non_negative(FusedClass<FusedNovoGradOptions>::kName, "options", "lr", lr);
  this->lr(lr);
}

void FusedNovoGradParamState::serialize(torch::serialize::InputArchive& archive) {
  read_tensors<FusedNovoGradOptions>(archive, *this);
}
void FusedNovoGradParamState::serialize(torch::serialize::OutputArchive& archive) const {
  write_tensors<FusedNovoGradOptions>(archive, *this);
}

}  // namespace torchfuse::optim
