// SPDX-License-Identifier: BSD-3-Clause
// A fast check for the tensor lists of apex's raw functions, and unboxed calls of operators. If the
// fast check fails, Python checks the lists again to name the error.
//
// torch.ops boxes and unboxes every list, which costs as much as the check. The functions here call
// the dispatcher without boxing.
#include <ATen/ScalarOps.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <torchfuse/ops.h>

#include "bindings/bindings.h"
#include "bindings/is_tensor.h"

namespace torchfuse::bindings {
namespace {

namespace py = pybind11;

/// Returns whether the tensor has concrete sizes and strides.
bool has_strides(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided &&
         !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

bool is_dense(const at::Tensor& tensor) {
  return tensor.is_contiguous() || tensor.is_contiguous(at::MemoryFormat::ChannelsLast) ||
         tensor.is_contiguous(at::MemoryFormat::ChannelsLast3d);
}

bool is_supported(at::ScalarType type) {
  return type == at::kFloat || type == at::kHalf || type == at::kBFloat16 || type == at::kDouble;
}

using Tensors = std::vector<at::Tensor>;

/// Prefetches a TensorImpl, because tensors that were not used recently have left the caches.
void prefetch(const at::Tensor& tensor) {
  constexpr std::size_t kLine = 64;
  const auto* memory = reinterpret_cast<const char*>(tensor.unsafeGetTensorImpl());
  for (std::size_t line = 0; line < sizeof(at::TensorImpl); line += kLine) {
    __builtin_prefetch(memory + line);
  }
}

/// Returns a list's tensors, or nullopt if an entry is not a tensor. Collects all tensors before
/// checking any, because checking a subclass may run Python code that modifies the list.
std::optional<Tensors> tensors_of(py::handle list) {
  constexpr Py_ssize_t kAhead = 8;
  if (!PyList_CheckExact(list.ptr())) return std::nullopt;
  const Py_ssize_t size = PyList_GET_SIZE(list.ptr());
  Tensors tensors;
  tensors.reserve(static_cast<std::size_t>(size));
  for (Py_ssize_t i = 0; i < size; ++i) {
    if (i + kAhead < size) __builtin_prefetch(PyList_GET_ITEM(list.ptr(), i + kAhead));
    PyObject* entry = PyList_GET_ITEM(list.ptr(), i);
    if (!is_tensor(entry)) return std::nullopt;
    tensors.push_back(THPVariable_Unpack(entry));
    prefetch(tensors.back());
  }
  return tensors;
}

/// Returns whether device, sizes and strides match the already checked tensor `beside`.
bool is_stored_as(const at::Tensor& tensor, const at::Tensor& beside) {
  return tensor.is_same(beside) ||
         (tensor.device() == beside.device() && tensor.sizes() == beside.sizes() &&
          tensor.strides() == beside.strides());
}

bool match(const std::vector<Tensors>& lists) {
  for (const Tensors& list : lists) {
    if (list.size() != lists[0].size()) return false;
    for (std::size_t i = 0; i < list.size(); ++i) {
      const at::Tensor& tensor = list[i];
      if (tensor.scalar_type() != list[0].scalar_type() || tensor.device() != list[0].device() ||
          !is_supported(tensor.scalar_type()) || !has_strides(tensor)) {
        return false;
      }
      const bool is_first_list = &list == &lists[0];
      if (is_first_list ? !is_dense(tensor) : !is_stored_as(tensor, lists[0][i])) return false;
    }
  }
  return true;
}

/// Returns the lists if they contain tensors that match, otherwise nullopt.
std::optional<std::vector<Tensors>> matching(py::handle tensor_lists) {
  std::vector<Tensors> lists;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensor_lists.ptr()); ++i) {
    auto tensors = tensors_of(PyList_GET_ITEM(tensor_lists.ptr(), i));
    if (!tensors) return std::nullopt;
    lists.push_back(std::move(*tensors));
  }
  return match(lists) ? std::optional(std::move(lists)) : std::nullopt;
}

/// Returns a function that calls `op` with vectors, which pybind11 can convert to.
template <class... Args>
auto on_vectors(void (*op)(Args...)) {
  return [op](const std::conditional_t<std::is_same_v<Args, at::TensorList>, Tensors,
                                       std::decay_t<Args>>&... args) { op(args...); };
}

/// Returns whether inference mode, a Python dispatch mode (such as fake tensors) or torch.func is
/// active. New tensors may then have no value, or be unusable outside the mode.
bool in_any_mode() {
  const c10::DispatchKeySet included = c10::impl::tls_local_dispatch_key_set().included_;
  return c10::InferenceMode::is_enabled() || included.has(c10::DispatchKey::Python) ||
         included.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

/// Checked arguments of a raw function on the CPU.
struct HostCall {
  at::Tensor flag;
  std::vector<Tensors> lists;
};

std::optional<HostCall> host_call(py::handle noop_flag, py::handle tensor_lists,
                                  std::size_t count) {
  if (!is_tensor(noop_flag.ptr()) || !PyList_CheckExact(tensor_lists.ptr()) || in_any_mode()) {
    return std::nullopt;
  }
  at::Tensor flag = THPVariable_Unpack(noop_flag.ptr());
  if (!flag.is_cpu() || flag.scalar_type() != at::kInt || !has_strides(flag) || flag.numel() != 1 ||
      flag.is_inference() || flag._is_zerotensor()) {
    return std::nullopt;
  }
  auto lists = matching(tensor_lists);
  if (!lists || lists->size() != count || (*lists)[0].empty() || !(*lists)[0][0].is_cpu()) {
    return std::nullopt;
  }
  return HostCall{std::move(flag), std::move(*lists)};
}

/// Computes multi_tensor_l2norm without per-tensor norms.
std::optional<std::tuple<at::Tensor, at::Tensor>> l2norm_on_host(py::handle noop_flag,
                                                                 py::handle tensor_lists) {
  const auto call = host_call(noop_flag, tensor_lists, 1);
  if (!call) return std::nullopt;
  const py::gil_scoped_release no_gil;
  const at::NoGradGuard no_grad;
  const auto [norm, non_finite] = multi_tensor_l2_norm(call->lists[0]);
  const bool bad = non_finite.item<float>() != 0.0f || !std::isfinite(norm.item<double>());
  if (bad) call->flag.fill_(1);
  return std::make_tuple(norm.view({1}), at::empty({0}, norm.options()));
}

/// Scales in place if both lists contain the same tensors. Otherwise returns false, without effect.
bool scale_on_host(py::handle noop_flag, py::handle tensor_lists, double scale) {
  const auto call = host_call(noop_flag, tensor_lists, 2);
  if (!call) return false;
  const Tensors &inputs = call->lists[0], &outputs = call->lists[1];
  const auto same = [](const at::Tensor& one, const at::Tensor& other) {
    return one.is_same(other);
  };
  if (!std::equal(inputs.begin(), inputs.end(), outputs.begin(), outputs.end(), same)) return false;
  const py::gil_scoped_release no_gil;
  const at::NoGradGuard no_grad;
  const auto number = [](double value) {
    return at::detail::scalar_tensor_static(value, at::kFloat, at::kCPU);
  };
  const at::Tensor non_finite = number(0.0);
  multi_tensor_unscale_(outputs, non_finite, number(scale));
  if (non_finite.item<float>() != 0.0f) call->flag.fill_(1);
  return true;
}

}  // namespace

void bind_tensor_lists(py::module_& module) {
  module.def(
      "lists_match", [](const py::list& lists) { return matching(lists).has_value(); },
      py::arg("lists"));
  using NoGil = py::call_guard<py::gil_scoped_release>;
  module.def(
      "multi_tensor_l2_norm", [](const Tensors& tensors) { return multi_tensor_l2_norm(tensors); },
      py::arg("tensors"), NoGil());
  module.def("multi_tensor_unscale_", on_vectors(&multi_tensor_unscale_), py::arg("tensors"),
             py::arg("found_inf"), py::arg("inv_scale"), NoGil());
  module.def("l2norm_on_host", &l2norm_on_host, py::arg("noop_flag"), py::arg("tensor_lists"));
  module.def("scale_on_host", &scale_on_host, py::arg("noop_flag"), py::arg("tensor_lists"),
             py::arg("scale"));
  const auto none = py::none();
  module.def("fused_adam_", on_vectors(&fused_adam_), py::arg("params"), py::arg("grads"),
             py::arg("exp_avgs"), py::arg("exp_avg_sqs"), py::arg("max_exp_avg_sqs"),
             py::arg("state_steps"), py::arg("master_params"), py::arg("lr"), py::arg("beta1"),
             py::arg("beta2"), py::arg("weight_decay"), py::arg("eps"), py::arg("amsgrad") = false,
             py::arg("maximize") = false, py::arg("adam_w_mode") = true,
             py::arg("bias_correction") = true, py::arg("lr_tensor") = none,
             py::arg("grad_scale") = none, py::arg("found_inf") = none, NoGil());
  module.def("fused_sgd_", on_vectors(&fused_sgd_), py::arg("params"), py::arg("grads"),
             py::arg("momentum_buffers"), py::arg("state_steps"), py::arg("master_params"),
             py::arg("lr"), py::arg("momentum"), py::arg("dampening"), py::arg("weight_decay"),
             py::arg("nesterov") = false, py::arg("wd_after_momentum") = false,
             py::arg("maximize") = false, py::arg("lr_tensor") = none, py::arg("grad_scale") = none,
             py::arg("found_inf") = none, NoGil());
  module.def("fused_adagrad_", on_vectors(&fused_adagrad_), py::arg("params"), py::arg("grads"),
             py::arg("sums"), py::arg("state_steps"), py::arg("master_params"), py::arg("lr"),
             py::arg("lr_decay"), py::arg("eps"), py::arg("weight_decay"),
             py::arg("adagrad_w_mode") = false, py::arg("maximize") = false,
             py::arg("lr_tensor") = none, py::arg("grad_scale") = none, py::arg("found_inf") = none,
             NoGil());
}

}  // namespace torchfuse::bindings
