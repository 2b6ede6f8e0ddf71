// SPDX-License-Identifier: BSD-3-Clause
#include "ops/algorithm.h"

#include <c10/util/Exception.h>
#include <torchfuse/device_copy.h>

#include <cmath>
#include <map>
#include <sstream>
#include <utility>

#include "ops/check.h"

namespace torchfuse::ops {

namespace {

std::map<std::string, AlgorithmFactory>& registry() {
  static std::map<std::string, AlgorithmFactory> factories;
  return factories;
}

std::string range_text(double low, double high) {
  std::ostringstream out;
  out << "be a number";
  if (std::isfinite(low)) out << " of at least " << low;
  if (std::isfinite(high)) out << (std::isfinite(low) ? " and" : "") << " below " << high;
  return out.str();
}

}  // namespace

GroupReader::GroupReader(const char* op, const std::vector<std::string>& names, std::int64_t group,
                         const std::vector<HyperParam>& values, const c10::Device& device,
                         std::vector<at::Tensor>& tensors)
    : op_(op), names_(names), group_(group), values_(values), device_(device), tensors_(tensors) {
  TORCH_CHECK(values.size() == names.size(), op, ": expected groups[", group, "] to hold ",
              names.size(), " hyper-parameters, got ", values.size(), ".");
}

kernels::HyperParam GroupReader::number(double low, double high) {
  const Argument argument{op_, names_[next_].c_str(), group_};
  const HyperParam& value = values_[next_++];
  kernels::HyperParam result;
  if (const double* number = std::get_if<double>(&value)) {
    if (!(*number >= low && *number < high) && !(std::isinf(*number) && *number == low)) {
      std::ostringstream got;
      got << *number;
      fail(argument, range_text(low, high), got.str(), "The index is the parameter group.");
    }
    result.value = *number;
    return result;
  }
  return read_tensor(argument, std::get<at::Tensor>(value));
}

kernels::HyperParam GroupReader::bound(double low) {
  const Argument argument{op_, names_[next_].c_str(), group_};
  const double* number = std::get_if<double>(&values_[next_]);
  if (number == nullptr || !std::isinf(*number)) return this->number(low);
  if (*number < low) fail(argument, range_text(low, *number), "-inf");
  ++next_;
  kernels::HyperParam result;
  result.value = *number;
  return result;
}

void GroupReader::check_order(const kernels::HyperParam& low,
                              const kernels::HyperParam& high) const {
  if (low.pointer != nullptr || high.pointer != nullptr || low.value <= high.value) return;
  fail({op_, names_[next_ - 1].c_str(), group_},
       "be at least " + names_[next_ - 2] + ", " + c10::str(low.value), c10::str(high.value),
       "The index is the parameter group.");
}

kernels::HyperParam GroupReader::read_tensor(const Argument& argument, const at::Tensor& tensor) {
  kernels::HyperParam result;
  const bool is_double = tensor.defined() && tensor.scalar_type() == at::kDouble;
  check_scalar(argument, tensor, is_double ? at::kDouble : at::kFloat);
  const at::Tensor local = to_device(tensor, device_);
  tensors_.push_back(local);
  result.pointer = local.const_data_ptr();
  result.dtype = is_double ? kernels::DType::kFloat64 : kernels::DType::kFloat32;
  return result;
}

bool GroupReader::flag() {
  const Argument argument{op_, names_[next_].c_str(), group_};
  const HyperParam& value = values_[next_++];
  const double* number = std::get_if<double>(&value);
  if (number == nullptr) fail(argument, "be True or False", "a tensor");
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
