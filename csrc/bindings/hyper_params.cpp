// SPDX-License-Identifier: BSD-3-Clause
#include "bindings/hyper_params.h"

#include <c10/util/Exception.h>
#include <c10/util/FunctionRef.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <limits>
#include <variant>

namespace torchfuse::bindings {
namespace {

/// Returns the beginning of a message, up to "to be".
using Expected = c10::function_ref<std::string()>;

double float_of(py::handle value, Expected expected) {
  const double number = PyFloat_AsDouble(value.ptr());
  if (number != -1.0 || PyErr_Occurred() == nullptr) return number;
  const bool no_number = PyErr_ExceptionMatches(PyExc_TypeError) != 0;
  const py::error_already_set error;
  TORCH_CHECK_TYPE(!no_number, expected(), " a number or a 1-element tensor, got ",
                   Py_TYPE(value.ptr())->tp_name, ".");
  TORCH_CHECK_VALUE(false, expected(), " a number that a float can hold: ",
                    py::cast<std::string>(py::str(error.value())), ".");
}

/// Returns a 1-element tensor in the kernels' form: 0-dim, fp32 or fp64.
at::Tensor as_native(const at::Tensor& tensor) {
  const bool native = tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kDouble;
  const at::Tensor plain = tensor.detach();
  return (native ? plain : plain.to(at::kFloat)).reshape({});
}

/// Returns a host number, or a 0-dim fp32 or fp64 tensor.
HyperParam value_of(py::handle value, Expected expected) {
  if (!THPVariable_Check(value.ptr())) return float_of(value, expected);
  const at::Tensor& tensor = THPVariable_Unpack(value.ptr());
  if (tensor.numel() != 1 || !tensor.is_floating_point() || tensor.layout() != at::kStrided) {
    TORCH_CHECK_VALUE(
        false, expected(), " a number or a 1-element tensor of a floating dtype, got a ",
        py::cast<std::string>(py::str(value.attr("dtype"))), " tensor of shape ", tensor.sizes(),
        " and layout ", py::cast<std::string>(py::str(value.attr("layout"))), ".");
  }
  TORCH_CHECK_VALUE(
      !tensor.is_meta(), expected(),
      " a number or a tensor with a value, got a tensor on the meta device. Create it "
      "on the device of the parameters.");
  // Read host tensors here, because kernels accept numbers on every device.
  if (tensor.is_cpu()) return tensor.item<double>();
  return as_native(tensor);
}

void check_range(const HyperParamInfo& info, double number, double least, Expected expected) {
  if (const auto violation = info.violation(number, least)) {
    TORCH_CHECK_VALUE(false, expected(), " ", *violation, ", got ", number, ".");
  }
}

}  // namespace

HyperParamReader::HyperParamReader(const std::string& algorithm,
                                   const std::vector<std::string>& places)
    : table_(hyper_params_of(algorithm)) {
  for (std::size_t i = 0; i < std::min(places.size(), table_.size()); ++i) {
    table_[i].name = places[i];
    if (!table_[i].at_least.empty()) table_[i].at_least = places[i - 1];
  }
}

void HyperParamReader::read(py::handle values, const std::string& caller, std::size_t group,
                            bool read_devices, std::vector<HyperParam>& result) const {
  TORCH_CHECK_TYPE(PySequence_Check(values.ptr()) != 0, "FusedStep: expected groups[", group,
                   "] to be a sequence, got ", Py_TYPE(values.ptr())->tp_name);
  const auto sequence = py::reinterpret_borrow<py::sequence>(values);
  TORCH_CHECK(sequence.size() == table_.size(), "FusedStep: expected groups[", group, "] to hold ",
              table_.size(), " values, got ", sequence.size());
  constexpr double kNone = -std::numeric_limits<double>::infinity();
  double previous = kNone;
  result.clear();
  for (std::size_t i = 0; i < table_.size(); ++i) {
    const HyperParamInfo& info = table_[i];
    const auto expected = [&] {
      return caller + ": expected " + info.name + " of group " + std::to_string(group) + " to be";
    };
    const py::object value = sequence[i];
    const HyperParam& found = result.emplace_back(value_of(value, expected));
    const auto* number = std::get_if<double>(&found);
    double checked = kNone;
    if (number != nullptr) {
      checked = *number;
    } else if (read_devices) {
      checked = std::get<at::Tensor>(found).item<double>();
    }
    if (number != nullptr || read_devices) check_range(info, checked, previous, expected);
    previous = checked;
  }
}

HyperParam number_or_tensor(py::handle value, const std::string& expected) {
  if (!THPVariable_Check(value.ptr())) return value_of(value, [&] { return expected; });
  return as_native(THPVariable_Unpack(value.ptr()));
}

void check_hyper_param(const std::string& algorithm, const std::string& name, py::handle value,
                       const std::string& expected) {
  const std::vector<HyperParamInfo>& table = hyper_params_of(algorithm);
  const auto info = std::find_if(table.begin(), table.end(),
                                 [&](const HyperParamInfo& entry) { return entry.name == name; });
  if (info == table.end()) throw py::key_error(name);
  const auto start = [&] { return expected; };
  const HyperParam found = value_of(value, start);
  const auto* number = std::get_if<double>(&found);
  const double checked = number != nullptr ? *number : std::get<at::Tensor>(found).item<double>();
  check_range(*info, checked, -std::numeric_limits<double>::infinity(), start);
}

}  // namespace torchfuse::bindings
