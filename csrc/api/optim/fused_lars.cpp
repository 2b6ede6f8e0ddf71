// SPDX-License-Identifier: BSD-3-Clause
// FusedLARS: what is particular to its options and states.
#include <torchfuse/optim/fused_lars.h>

#include "api/optim/fused_class_step.h"

namespace torchfuse::optim {

template <>
struct FusedClass<FusedLARSOptions> {
  static constexpr const char* kName = "FusedLARS";
  static constexpr const char* kAlgorithm = "lars";
  static constexpr std::size_t kRequired = 1;

  template <class Self, class Visit>
  static void options(Self& options, const Visit& visit) {
    visit("lr", options.lr());
    visit("momentum", options.momentum());
    visit("weight_decay", options.weight_decay());
    visit("trust_coefficient", options.trust_coefficient());
    visit("eps", options.eps());
    visit("nesterov", options.nesterov());
    visit("maximize", options.maximize());
    visit("master_weights", options.master_weights());
    visit("max_grad_norm", options.max_grad_norm());
    visit("write_back_grads", options.write_back_grads());
    visit("skip_non_finite", options.skip_non_finite());
  }

  template <class Self, class Visit>
  static void states(Self& state, const Visit& visit) {
    visit("momentum_buffer", state.momentum_buffer());
  }

  static bool uses_state(const FusedLARSOptions& /*options*/, std::size_t /*index*/) {
    return true;
  }

  static std::vector<HyperParam> hyper_params(const FusedLARSOptions& options) {
    return {options.lr(),
            options.momentum(),
            options.weight_decay(),
            options.trust_coefficient(),
            options.eps(),
            static_cast<double>(options.nesterov()),
            static_cast<double>(options.maximize())};
  }
};

template class FusedOptimizerOf<FusedLARSOptions, FusedLARSParamState>;

FusedLARSOptions::FusedLARSOptions(double lr) : lr_(lr) {}

void FusedLARSOptions::check(const std::string& owner) const {
  constexpr const char* kName = FusedClass<FusedLARSOptions>::kName;
  check_non_negative(kName, owner, "lr", lr());
  check_non_negative(kName, owner, "momentum", momentum());
  check_non_negative(kName, owner, "weight_decay", weight_decay());
  check_non_negative(kName, owner, "trust_coefficient", trust_coefficient());
  check_non_negative(kName, owner, "eps", eps());
  TORCH_CHECK_VALUE(!nesterov() || momentum() > 0.0, kName, ": expected ", owner,
                    ".nesterov to come with a momentum above 0, got ", momentum(),
                    ". Set one, or leave nesterov out.");
  check_max_grad_norm(kName, owner, max_grad_norm());
}

void FusedLARSOptions::serialize(torch::serialize::InputArchive& archive) {
  read_options(archive, *this);
}
void FusedLARSOptions::serialize(torch::serialize::OutputArchive& archive) const {
  write_options(archive, *this);
}
double FusedLARSOptions::get_lr() const { return lr(); }
void FusedLARSOptions::set_lr(double lr) {
  check_non_negative(FusedClass<FusedLARSOptions>::kName, "options", "lr", lr);
  this->lr(lr);
}

void FusedLARSParamState::serialize(torch::serialize::InputArchive& archive) {
  read_tensors<FusedLARSOptions>(archive, *this);
}
void FusedLARSParamState::serialize(torch::serialize::OutputArchive& archive) const {
  write_tensors<FusedLARSOptions>(archive, *this);
}

}  // namespace torchfuse::optim
