// SPDX-License-Identifier: BSD-3-Clause
#include <torchfuse/optim/lr_scheduler/lambda_lr.h>

#include <ATen/core/List.h>
#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>

namespace torchfuse::optim {
namespace {

/// Returns empty entries. Python saves the state of callable objects; C++ functions have no state.
c10::IValue no_states(std::size_t count) {
  c10::impl::GenericList states(c10::AnyType::get());
  for (std::size_t i = 0; i < count; ++i) states.push_back(c10::IValue());
  return states;
}

std::vector<double> times(std::vector<double> rates,
                          const std::vector<LRLambdas::Function>& functions, std::int64_t epoch) {
  for (std::size_t i = 0; i < rates.size(); ++i) rates[i] *= functions[i](epoch);
  return rates;
}

}  // namespace

std::vector<LRLambdas::Function> LRLambdas::per_group(const char* owner, std::size_t groups) const {
  std::vector<Function> functions = functions_;
  if (!each_) functions.resize(groups, functions_[0]);
  TORCH_CHECK_VALUE(functions.size() == groups, owner,
                    ": expected lr_lambda to be one function or one for each of the ", groups,
                    " parameter groups, got ", functions.size(), ".");
  for (std::size_t i = 0; i < groups; ++i) {
    TORCH_CHECK_VALUE(functions[i] != nullptr, owner, ": expected lr_lambda of group ", i,
                      " to be a function, got an empty one.");
  }
  return functions;
}

LambdaLR::LambdaLR(torch::optim::Optimizer& optimizer, const LRLambdas& lr_lambda,
                   std::int64_t last_epoch)
    : LRScheduler("LambdaLR", optimizer, last_epoch),
      lr_lambdas_(lr_lambda.per_group(name(), base_lrs_.size())) {
  initial_step();
}

std::vector<double> LambdaLR::get_lr(std::int64_t epoch) const {
  return times(base_lrs_, lr_lambdas_, epoch);
}

void LambdaLR::visit_state(LRSchedulerFields& fields) {
  LRScheduler::visit_state(fields);
  fields.constant("lr_lambdas", no_states(lr_lambdas_.size()));
}

MultiplicativeLR::MultiplicativeLR(torch::optim::Optimizer& optimizer, const LRLambdas& lr_lambda,
                                   std::int64_t last_epoch)
    : LRScheduler("MultiplicativeLR", optimizer, last_epoch),
      lr_lambdas_(lr_lambda.per_group(name(), base_lrs_.size())) {
  initial_step();
}

std::vector<double> MultiplicativeLR::get_lr(std::int64_t epoch) const {
  if (is_initial()) return current_lrs();
  return times(current_lrs(), lr_lambdas_, epoch);
}

void MultiplicativeLR::visit_state(LRSchedulerFields& fields) {
  LRScheduler::visit_state(fields);
  fields.constant("lr_lambdas", no_states(lr_lambdas_.size()));
}

}  // namespace torchfuse::optim
