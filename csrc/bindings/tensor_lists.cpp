// SPDX-License-Identifier: BSD-3-Clause
// The quick check of the lists that apex's raw functions take, and what they call on lists. What
// the check does not accept, Python looks at again, to name what is wrong.
//
// torch.ops would make a list of boxed values for each call, and lists again from that: as much
// work as the check. These calls go through the dispatcher too, without boxes.
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

namespace torchfuse::bindings {
namespace {

namespace py = pybind11;

/// Whether sizes and strides can be asked for.
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

const at::Tensor& tensor_at(const py::list& list, std::size_t i) {
  return THPVariable_Unpack(PyList_GET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i)));
}

/// Compares with the entry of the same index in the first list, which has been looked at before.
bool is_stored_as(const at::Tensor& tensor, const at::Tensor& beside) {
  return tensor.is_same(beside) ||
         (tensor.device() == beside.device() && tensor.sizes() == beside.sizes() &&
          tensor.strides() == beside.strides());
}

bool is_tensor(const py::list& list, std::size_t i) {
  return THPVariable_Check(PyList_GET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i)));
}

/// How many tensors of a list are asked for at a time.
constexpr std::size_t kAhead = 8;

/// Tensors that have not been used for a while are not in the caches, and each would be waited for.
/// This asks for what the i-th one tells of itself, and for an object further on.
void prefetch(const py::list& list, std::size_t i) {
  constexpr std::size_t kLine = 64;
  if (i + kAhead < list.size()) {
    __builtin_prefetch(PyList_GET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i + kAhead)));
  }
  if (i >= list.size() || !is_tensor(list, i)) return;
  const auto* tensor = reinterpret_cast<const char*>(tensor_at(list, i).unsafeGetTensorImpl());
  for (std::size_t line = 0; line < sizeof(at::TensorImpl); line += kLine) {
    __builtin_prefetch(tensor + line);
  }
}

bool lists_match(const std::vector<py::list>& lists) {
  for (const py::list& list : lists) {
    if (list.size() != lists[0].size()) return false;
    for (std::size_t i = 0; i < kAhead; ++i) prefetch(list, i);
    for (std::size_t i = 0; i < list.size(); ++i) {
      prefetch(list, i + kAhead);
      if (!is_tensor(list, i)) return false;
      const at::Tensor& tensor = tensor_at(list, i);
      const at::Tensor& first = tensor_at(list, 0);
      if (tensor.scalar_type() != first.scalar_type() || tensor.device() != first.device() ||
          !is_supported(tensor.scalar_type()) || !has_strides(tensor)) {
        return false;
      }
      const bool is_first_list = &list == &lists[0];
      if (is_first_list ? !is_dense(tensor) : !is_stored_as(tensor, tensor_at(lists[0], i))) {
        return false;
      }
    }
  }
  return true;
}

using Tensors = std::vector<at::Tensor>;

/// An operator whose lists are vectors, as pybind11 makes them.
template <class... Args>
auto on_vectors(void (*op)(Args...)) {
  return [op](const std::conditional_t<std::is_same_v<Args, at::TensorList>, Tensors,
                                       std::decay_t<Args>>&... args) { op(args...); };
}

/// Whether new tensors may lack a value or be of use in here only: in inference mode, in a mode
/// such as that of fake tensors, and in torch.func.
bool in_any_mode() {
  const c10::DispatchKeySet included = c10::impl::tls_local_dispatch_key_set().included_;
  return c10::InferenceMode::is_enabled() || included.has(c10::DispatchKey::Python) ||
         included.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

/// The lists of a raw function's call on the host, if there is nothing to be said of its arguments.
std::optional<std::vector<py::list>> lists_on_host(py::handle noop_flag, py::handle tensor_lists,
                                                   std::size_t count) {
  if (!THPVariable_Check(noop_flag.ptr()) || !PyList_Check(tensor_lists.ptr()) || in_any_mode()) {
    return std::nullopt;
  }
  const at::Tensor& flag = THPVariable_Unpack(noop_flag.ptr());
  if (!flag.is_cpu() || flag.scalar_type() != at::kInt || flag.numel() != 1) return std::nullopt;
  std::vector<py::list> lists;
  for (const py::handle list : py::reinterpret_borrow<py::list>(tensor_lists)) {
    if (!PyList_Check(list.ptr())) return std::nullopt;
    lists.push_back(py::reinterpret_borrow<py::list>(list));
  }
  if (lists.size() != count || lists[0].empty() || !lists_match(lists)) return std::nullopt;
  return tensor_at(lists[0], 0).is_cpu() ? std::optional(std::move(lists)) : std::nullopt;
}

/// multi_tensor_l2norm without the norms of each.
std::optional<std::tuple<at::Tensor, at::Tensor>> l2norm_on_host(py::handle noop_flag,
                                                                 py::handle tensor_lists) {
  const auto lists = lists_on_host(noop_flag, tensor_lists, 1);
  if (!lists) return std::nullopt;
  const auto tensors = (*lists)[0].cast<Tensors>();
  const at::Tensor& flag = THPVariable_Unpack(noop_flag.ptr());
  const py::gil_scoped_release no_gil;
  const at::NoGradGuard no_grad;
  const auto [norm, non_finite] = multi_tensor_l2_norm(tensors);
  if (non_finite.item<float>() != 0.0f || !std::isfinite(norm.item<double>())) flag.fill_(1);
  return std::make_tuple(norm.view({1}), at::empty({0}, norm.options()));
}

/// multi_tensor_scale of lists that are the same; else nothing happens.
bool scale_on_host(py::handle noop_flag, py::handle tensor_lists, double scale) {
  const auto lists = lists_on_host(noop_flag, tensor_lists, 2);
  if (!lists) return false;
  const py::list &inputs = (*lists)[0], &outputs = (*lists)[1];
  const auto same = [](py::handle one, py::handle other) { return one.is(other); };
  if (!std::equal(inputs.begin(), inputs.end(), outputs.begin(), outputs.end(), same)) return false;
  const auto tensors = outputs.cast<Tensors>();
  const at::Tensor& flag = THPVariable_Unpack(noop_flag.ptr());
  const py::gil_scoped_release no_gil;
  const at::NoGradGuard no_grad;
  const auto number = [](double value) {
    return at::detail::scalar_tensor_static(value, at::kFloat, at::kCPU);
  };
  const at::Tensor non_finite = number(0.0);
  multi_tensor_unscale_(tensors, non_finite, number(scale));
  if (non_finite.item<float>() != 0.0f) flag.fill_(1);
  return true;
}

}  // namespace

void bind_tensor_lists(py::module_& module) {
  module.def("lists_match", &lists_match, py::arg("lists"));
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
