// SPDX-License-Identifier: BSD-3-Clause
// FusedSGD: what is particular to its options and states.
#include <torchfuse/optim/fused_sgd.h>

#include "api/optim/fused_class_step.h"

namespace torchfuse::optim {

template <>
struct FusedClass<FusedSGDOptions> {
  static constexpr const char* kName = "FusedSGD";
  static constexpr const char* kAlgorithm = "sgd";
  static constexpr std::size_t kRequired = 0;

  template <class Self, class Visit>
  static void options(Self& options, const Visit& visit) {
    visit("lr", options.lr());
    visit("momentum", options.momentum());
    visit("dampening", options.dampening());
    visit("weight_decay", options.weight_decay());
    visit("nesterov", options.nesterov());
    visit("wd_after_momentum", options.wd_after_momentum());
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

  static bool uses_state(const FusedSGDOptions& options, std::size_t /*index*/) {
    return options.momentum() != 0.0;
  }

  /// The first step of a buffer is told by the count.
  static void begin_state(const FusedSGDOptions& /*options*/, FusedSlot& slot,
                          std::size_t /*index*/) {
    slot.step = at::Tensor();
  }

  static std::vector<HyperParam> hyper_params(const FusedSGDOptions& options) {
    return {options.lr(),
            options.momentum(),
            options.dampening(),
            options.weight_decay(),
            static_cast<double>(options.nesterov()),
            static_cast<double>(options.wd_after_momentum()),
            static_cast<double>(options.maximize())};
  }
};

template class FusedOptimizerOf<FusedSGDOptions, FusedSGDParamState>;

FusedSGDOptions::FusedSGDOptions(double lr) : lr_(lr) {}

void FusedSGDOptions::check(const std::string& owner) const {
  constexpr const char* kName = FusedClass<FusedSGDOptions>::kName;
  check_non_negative(kName, owner, "lr", lr());
  check_non_negative(kName, owner, "momentum", momentum());
  check_non_negative(kName, owner, "dampening", dampening());
  check_non_negative(kName, owner, "weight_decay", weight_decay());
  TORCH_CHECK_VALUE(!nesterov() || (momentum() > 0.0 && dampening() == 0.0), kName, ": expected ",
                    owner, ".nesterov to come with a momentum above 0 and a dampening of 0, got ",
                    momentum(), " and ", dampening(), ". Set both, or leave nesterov out.");
  check_max_grad_norm(kName, owner, max_grad_norm());
}

void FusedSGDOptions::serialize(torch::serialize::InputArchive& archive) {
  read_options(archive, *this);
}
void FusedSGDOptions::serialize(torch::serialize::OutputArchive& archive) const {
  write_options(archive, *this);
}
double FusedSGDOptions::get_lr() const { return lr(); }
void FusedSGDOptions::set_lr(double lr) {
  check_non_negative(FusedClass<FusedSGDOptions>::kName, "options", "lr", lr);
  this->lr(lr);
}

void FusedSGDParamState::serialize(torch::serialize::InputArchive& archive) {
  read_tensors<FusedSGDOptions>(archive, *this);
}
void FusedSGDParamState::serialize(torch::serialize::OutputArchive& archive) const {
  write_tensors<FusedSGDOptions>(archive, *this);
}

}  // namespace torchfuse::optim
