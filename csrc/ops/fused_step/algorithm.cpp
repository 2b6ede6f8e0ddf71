// SPDX-License-Identifier: BSD-3-Clause
#include "ops/fused_step/algorithm.h"

#include <c10/util/Exception.h>
#include <torchfuse/device_copy.h>

#include <map>
#include <optional>
#include <utility>

#include "ops/check.h"

namespace torchfuse::ops {

namespace {

std::map<std::string, AlgorithmFactory>& registry() {
  static std::map<std::string, AlgorithmFactory> factories;
  return factories;
}

}  // namespace

GroupReader::GroupReader(const char* caller, std::string whose,
                         const std::vector<HyperParamInfo>& infos,
                         const std::vector<HyperParam>& values, const c10::Device& device,
                         std::vector<at::Tensor>& tensors)
    : caller_(caller),
      whose_(std::move(whose)),
      infos_(infos),
      values_(values),
      device_(device),
      tensors_(tensors) {
  TORCH_CHECK(values.size() == infos.size(), caller, ": expected ", infos.size(),
              " hyper-parameters", whose_, ", got ", values.size(), ".");
}

kernels::ScalarParam GroupReader::number(std::size_t index) {
  const HyperParamInfo& info = infos_[index];
  kernels::ScalarParam result;
  if (const auto* tensor = std::get_if<at::Tensor>(&values_[index])) {
    // An op's tensor learning rate is in a separate argument, lr_tensor.
    const std::string name = whose_.empty() ? info.name + "_tensor" : info.name + whose_;
    const Argument argument{caller_, name.c_str()};
    if (info.on_host) fail(argument, "be a number", "a tensor");
    const bool is_double = tensor->defined() && tensor->scalar_type() == at::kDouble;
    if (tensor->defined() && !is_double && tensor->scalar_type() != at::kFloat) {
      fail(argument, "be of dtype Float or Double", c10::toString(tensor->scalar_type()));
    }
    check_scalar(argument, *tensor, is_double ? at::kDouble : at::kFloat);
    const at::Tensor& local = tensors_.emplace_back(to_device(*tensor, device_));
    result.pointer = local.const_data_ptr();
    result.dtype = is_double ? kernels::DType::kFloat64 : kernels::DType::kFloat32;
    return result;
  }
  result.value = std::get<double>(values_[index]);
  const auto* least = info.at_least.empty() ? nullptr : std::get_if<double>(&values_[index - 1]);
  const std::optional<std::string> expected =
      least == nullptr ? info.violation(result.value) : info.violation(result.value, *least);
  TORCH_CHECK(!expected, caller_, ": expected ", info.name, whose_, " to be ", *expected, ", got ",
              result.value, ".");
  return result;
}

bool GroupReader::flag(std::size_t index) const {
  const double* number = std::get_if<double>(&values_[index]);
  TORCH_CHECK(number != nullptr, caller_, ": expected ", infos_[index].name, whose_,
              " to be True or False, got a tensor.");
  return *number != 0.0;
}

bool register_algorithm(const std::string& name, AlgorithmFactory factory) {
  registry()[name] = std::move(factory);
  return true;
}

std::unique_ptr<Algorithm> make_algorithm(const std::string& name) {
  const auto found = registry().find(name);
  if (found == registry().end()) {
    std::string known;
    for (const auto& entry : registry()) known += (known.empty() ? "" : ", ") + entry.first;
    TORCH_CHECK(false, "FusedStep: expected algorithm to be one of: ", known, ", got ", name, ".");
  }
  return found->second();
}

}  // namespace torchfuse::ops
