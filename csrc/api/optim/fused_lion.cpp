// SPDX-License-Identifier: BSD-3-Clause
// FusedLion: what is particular to its options and states.
#include <torchfuse/optim/fused_lion.h>

#include "api/optim/fused_class_step.h"

namespace torchfuse::optim {

template <>
struct FusedClass<FusedLionOptions> {
  static constexpr const char* kName = "FusedLion";
  static constexpr const char* kAlgorithm = "lion";
  static constexpr std::size_t kRequired = 1;

  template <class Self, class Visit>
  static void options(Self& options, const Visit& visit) {
    visit("lr", options.lr());
    visit("betas", options.betas());
    visit("weight_decay", options.weight_decay());
    visit("maximize", options.maximize());
    visit("master_weights", options.master_weights());
    visit("max_grad_norm", options.max_grad_norm());
    visit("write_back_grads", options.write_back_grads());
    visit("skip_non_finite", options.skip_non_finite());
  }

  template <class Self, class Visit>
  static void states(Self& state, const Visit& visit) {
    visit("exp_avg", state.exp_avg());
  }

  static bool uses_state(const FusedLionOptions&, std::size_t) { return true; }

  static std::vector<HyperParam> hyper_params(const FusedLionOptions& options) {
    return {options.lr(), std::get<0>(options.betas()), std::get<1>(options.betas()),
            options.weight_decay(), static_cast<double>(options.maximize())};
  }
};

template class FusedOptimizerOf<FusedLionOptions, FusedLionParamState>;

FusedLionOptions::FusedLionOptions(double lr) : lr_(lr) {}

void FusedLionOptions::check(const std::string& owner) const {
  constexpr const char* kName = FusedClass<FusedLionOptions>::kName;
  check_non_negative(kName, owner, "lr", lr());
  check_below_one(kName, owner, "betas[0]", std::get<0>(betas()));
  check_below_one(kName, owner, "betas[1]", std::get<1>(betas()));
  check_non_negative(kName, owner, "weight_decay", weight_decay());
  check_max_grad_norm(kName, owner, max_grad_norm());
}

void FusedLionOptions::serialize(torch::serialize::InputArchive& archive) {
  read_options(archive, *this);
}
void FusedLionOptions::serialize(torch::serialize::OutputArchive& archive) const {
  write_options(archive, *this);
}
double FusedLionOptions::get_lr() const { return lr(); }
void FusedLionOptions::set_lr(double lr) {
  check_non_negative(FusedClass<FusedLionOptions>::kName, "options", "lr", lr);
  this->lr(lr);
}

void FusedLionParamState::serialize(torch::serialize::InputArchive& archive) {
  read_tensors<FusedLionOptions>(archive, *this);
}
void FusedLionParamState::serialize(torch::serialize::OutputArchive& archive) const {
  write_tensors<FusedLionOptions>(archive, *this);
}

}  // namespace torchfuse::optim
