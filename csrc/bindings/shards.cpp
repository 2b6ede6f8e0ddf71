// SPDX-License-Identifier: BSD-3-Clause
#include "bindings/shards.h"

#include <torch/csrc/autograd/python_variable.h>

#include <c10/util/Exception.h>

namespace torchfuse::bindings {

namespace py = pybind11;

namespace {

constexpr const char* kLocal = "_local_tensor";

bool is_sharded(py::handle tensor) { return py::hasattr(tensor, kLocal); }

/// What a DTensor holds here; it may still be on its way from other processes.
py::object local_of(py::handle tensor) {
  py::object local = tensor.attr(kLocal);
  // Nearly always; the look-up that fails would take longer than all the rest.
  if (THPVariable_CheckExact(local.ptr())) return local;
  return py::hasattr(local, "wait") ? local.attr("wait")() : local;
}

void check_placement(py::handle param, py::handle grad, std::size_t index) {
  TORCH_CHECK_TYPE(is_sharded(grad), "FusedStep: expected grads[", index,
                   "] to be a DTensor like its parameter, got ", Py_TYPE(grad.ptr())->tp_name, ".");
  const bool same = grad.attr("placements").equal(param.attr("placements")) &&
                    grad.attr("device_mesh").equal(param.attr("device_mesh"));
  if (same) return;
  const auto text = [](py::handle tensor) {
    return py::str(tensor.attr("placements")).cast<std::string>();
  };
  TORCH_CHECK_VALUE(false, "FusedStep: expected grads[", index,
                    "] to be placed like its parameter, ", text(param), ", got ", text(grad),
                    ". Redistribute it before the step.");
}

}  // namespace

at::Tensor Shards::local(py::handle tensor) {
  if (!is_sharded(tensor)) return THPVariable_Unpack(tensor.ptr());
  locals_.emplace_back(py::reinterpret_borrow<py::object>(tensor), local_of(tensor));
  return THPVariable_Unpack(locals_.back().second.ptr());
}

bool Shards::unchanged() const {
  for (const auto& [tensor, local] : locals_) {
    if (!local_of(tensor).is(local)) return false;
  }
  return true;
}

void LentGradients::lend(py::handle param, const at::Tensor& local, std::size_t index) {
  const py::object grad = param.attr("grad");
  if (grad.is_none()) return;
  check_placement(param, grad, index);
  local.mutable_grad() = THPVariable_Unpack(local_of(grad).ptr());
  lent_.push_back({local, THPVariable_Unpack(param.ptr()), THPVariable_Unpack(grad.ptr())});
}

void LentGradients::mark_written(bool grads) const {
  for (const Lent& lent : lent_) {
    lent.param.unsafeGetTensorImpl()->bump_version();
    if (grads) lent.grad.unsafeGetTensorImpl()->bump_version();
  }
}

LentGradients::~LentGradients() {
  for (const Lent& lent : lent_) lent.local.mutable_grad().reset();
}

}  // namespace torchfuse::bindings
