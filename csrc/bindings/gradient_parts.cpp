// SPDX-License-Identifier: BSD-3-Clause
// What ShardedOptimizer does with each parameter in a step, over whole lists: a call from Python
// for each tensor would take longer than what it does.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "bindings/bindings.h"

namespace torchfuse::bindings {
namespace {

namespace py = pybind11;
using Tensors = std::vector<at::Tensor>;

/// How a parameter comes to a step, in the order of `_STANDINGS` in _sharded_checks.py.
enum Standing : char { kNoGradient, kGradient, kNotDense, kMoved, kWholeGradient };

Standing standing_of(const at::Tensor& param, const at::Tensor& part, std::uintptr_t address,
                     bool scattered) {
  const at::Tensor& grad = scattered ? part.grad() : param.grad();
  if (reinterpret_cast<std::uintptr_t>(param.const_data_ptr()) != address) return kMoved;
  if (scattered && param.grad().defined()) return kWholeGradient;
  if (!grad.defined()) return kNoGradient;
  return grad.layout() == at::kStrided ? kGradient : kNotDense;
}

py::bytes standings(const Tensors& params, const Tensors& parts,
                    const std::vector<std::uintptr_t>& addresses, bool scattered) {
  std::string found(params.size(), kNoGradient);
  for (std::size_t index = 0; index < params.size(); ++index) {
    found[index] = standing_of(params[index], parts[index], addresses[index], scattered);
  }
  return found;
}

/// The gradient itself if its elements lie in memory in the parameter's order, else a copy.
at::Tensor laid_out_like(const at::Tensor& param, const at::Tensor& grad) {
  if (grad.strides() == param.strides() || grad.numel() <= 1) return grad;
  return at::empty_like(param, grad.options().requires_grad(false)).copy_(grad);
}

/// Gives each part its elements of the parameter's gradient. An empty part needs a gradient too, so
/// that all ranks count alike.
void take_gradients(const Tensors& params, const Tensors& parts,
                    const std::vector<std::int64_t>& begins) {
  // Nobody differentiates a step, and views that know of each other take longer to make.
  const at::AutoDispatchBelowADInplaceOrView no_views;
  for (std::size_t index = 0; index < params.size(); ++index) {
    const at::Tensor& grad = params[index].grad();
    if (!grad.defined()) continue;
    const std::int64_t count = parts[index].numel();
    const at::Tensor whole = count > 0 ? laid_out_like(params[index], grad) : grad;
    parts[index].mutable_grad() =
        whole.as_strided({count}, {1}, whole.storage_offset() + begins[index]);
  }
}

void reset_gradients(const Tensors& tensors) {
  for (const at::Tensor& tensor : tensors) tensor.mutable_grad().reset();
}

}  // namespace

void bind_gradient_parts(py::module_& module) {
  module.def("standings", &standings, py::arg("params"), py::arg("parts"), py::arg("addresses"),
             py::arg("scattered"));
  module.def("take_gradients", &take_gradients, py::arg("params"), py::arg("parts"),
             py::arg("begins"));
  module.def("reset_gradients", &reset_gradients, py::arg("tensors"));
}

}  // namespace torchfuse::bindings
