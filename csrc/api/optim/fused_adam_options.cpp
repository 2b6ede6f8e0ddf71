// SPDX-License-Identifier: BSD-3-Clause
// Options and per-parameter state of FusedAdam: ranges and archives.
#include <torchfuse/optim/fused_adam.h>

#include <c10/util/Exception.h>
#include <torch/serialize/archive.h>

#include <cmath>
#include <utility>

#include "api/optim/archive.h"

namespace torchfuse::optim {
namespace {

constexpr const char* kOptions = "FusedAdamOptions";

bool is_finite_non_negative(double value) { return std::isfinite(value) && value >= 0.0; }

// The conditions are written so that a NaN fails them.
void check_non_negative(const std::string& owner, const char* option, double value) {
  TORCH_CHECK_VALUE(is_finite_non_negative(value), "FusedAdam: expected ", owner, ".", option,
                    " to be a finite number >= 0, got ", value, ".");
}

void check_beta(const std::string& owner, int index, double value) {
  TORCH_CHECK_VALUE(value >= 0.0 && value < 1.0, "FusedAdam: expected ", owner, ".betas[", index,
                    "] to be in [0, 1), got ", value, ".");
}

FusedAdamOptions::betas_t read_betas(torch::serialize::InputArchive& archive) {
  const auto is_pair = [](const c10::IValue& value) {
    if (!value.isTuple()) return false;
    const auto& elements = value.toTupleRef().elements();
    return elements.size() == 2 && elements[0].isDouble() && elements[1].isDouble();
  };
  const c10::IValue value = read_value(archive, kOptions, "betas", "a pair of numbers", is_pair);
  const auto& elements = value.toTupleRef().elements();
  return {elements[0].toDouble(), elements[1].toDouble()};
}

std::optional<double> read_max_grad_norm(torch::serialize::InputArchive& archive) {
  return read_value(archive, kOptions, "max_grad_norm", "a number or none",
                    [](const c10::IValue& value) { return value.isNone() || value.isDouble(); })
      .toOptional<double>();
}

/// An absent tensor is an undefined one, as in torch's states.
torch::Tensor read_tensor(torch::serialize::InputArchive& archive, const char* key) {
  c10::IValue value;
  if (!archive.try_read(key, value)) return {};
  TORCH_CHECK_VALUE(value.isTensor(), "FusedAdamParamState: expected the archive's ", key,
                    " to be a tensor, got a value of type ", value.tagKind(), ".");
  return value.toTensor();
}

void write_tensor(torch::serialize::OutputArchive& archive, const char* key,
                  const torch::Tensor& tensor) {
  if (tensor.defined()) archive.write(key, c10::IValue(tensor.detach()));
}

}  // namespace

FusedAdamOptions::FusedAdamOptions(double lr) : lr_(lr) {}

void FusedAdamOptions::check(const std::string& owner) const {
  check_non_negative(owner, "lr", lr());
  check_beta(owner, 0, std::get<0>(betas()));
  check_beta(owner, 1, std::get<1>(betas()));
  check_non_negative(owner, "eps", eps());
  check_non_negative(owner, "weight_decay", weight_decay());
  TORCH_CHECK_VALUE(!max_grad_norm().has_value() || *max_grad_norm() >= 0.0, "FusedAdam: expected ",
                    owner, ".max_grad_norm to be >= 0 or none, got ", *max_grad_norm(), ".");
}

void FusedAdamOptions::serialize(torch::serialize::InputArchive& archive) {
  FusedAdamOptions loaded;
  loaded.lr(read_double(archive, kOptions, "lr"));
  loaded.betas(read_betas(archive));
  loaded.eps(read_double(archive, kOptions, "eps"));
  loaded.weight_decay(read_double(archive, kOptions, "weight_decay"));
  loaded.bias_correction(read_bool(archive, kOptions, "bias_correction"));
  loaded.adam_w_mode(read_bool(archive, kOptions, "adam_w_mode"));
  loaded.amsgrad(read_bool(archive, kOptions, "amsgrad"));
  loaded.maximize(read_bool(archive, kOptions, "maximize"));
  loaded.master_weights(read_bool(archive, kOptions, "master_weights"));
  loaded.max_grad_norm(read_max_grad_norm(archive));
  loaded.write_back_grads(read_bool(archive, kOptions, "write_back_grads"));
  loaded.skip_non_finite(read_bool(archive, kOptions, "skip_non_finite"));
  *this = loaded;
}

void FusedAdamOptions::serialize(torch::serialize::OutputArchive& archive) const {
  archive.write("lr", c10::IValue(lr()));
  archive.write("betas", c10::IValue(betas()));
  archive.write("eps", c10::IValue(eps()));
  archive.write("weight_decay", c10::IValue(weight_decay()));
  archive.write("bias_correction", c10::IValue(bias_correction()));
  archive.write("adam_w_mode", c10::IValue(adam_w_mode()));
  archive.write("amsgrad", c10::IValue(amsgrad()));
  archive.write("maximize", c10::IValue(maximize()));
  archive.write("master_weights", c10::IValue(master_weights()));
  archive.write("max_grad_norm", c10::IValue(max_grad_norm()));
  archive.write("write_back_grads", c10::IValue(write_back_grads()));
  archive.write("skip_non_finite", c10::IValue(skip_non_finite()));
}

double FusedAdamOptions::get_lr() const { return lr(); }

void FusedAdamOptions::set_lr(double lr) {
  check_non_negative("options", "lr", lr);
  this->lr(lr);
}

void FusedAdamParamState::serialize(torch::serialize::InputArchive& archive) {
  FusedAdamParamState loaded;
  loaded.step(read_tensor(archive, "step"));
  loaded.exp_avg(read_tensor(archive, "exp_avg"));
  loaded.exp_avg_sq(read_tensor(archive, "exp_avg_sq"));
  loaded.max_exp_avg_sq(read_tensor(archive, "max_exp_avg_sq"));
  loaded.master_param(read_tensor(archive, "master_param"));
  *this = std::move(loaded);
}

void FusedAdamParamState::serialize(torch::serialize::OutputArchive& archive) const {
  // A view is written with the whole buffer behind it, so the count gets a storage of its own.
  if (step().defined()) write_tensor(archive, "step", step().clone());
  write_tensor(archive, "exp_avg", exp_avg());
  write_tensor(archive, "exp_avg_sq", exp_avg_sq());
  write_tensor(archive, "max_exp_avg_sq", max_exp_avg_sq());
  write_tensor(archive, "master_param", master_param());
}

}  // namespace torchfuse::optim
