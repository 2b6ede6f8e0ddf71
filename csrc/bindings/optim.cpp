// SPDX-License-Identifier: BSD-3-Clause
// FusedStep for Python: the native step plus the check that the optimizer's dictionaries still hold
// the very objects that the plan was made from.
#include "bindings/bindings.h"
#include "bindings/dict_items.h"
#include "bindings/shards.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torchfuse/fused_step.h>

namespace torchfuse::bindings {
namespace {

/// One parameter of the plan.
struct Entry {
  py::object param;
  c10::TensorImpl* impl = nullptr;  ///< what `param` held; torch.utils.swap_tensors exchanges it
  py::object state;                 ///< the parameter's own dictionary, or null: no state yet
  DictItems items;                  ///< of `state`
  std::unique_ptr<Shards> shards;   ///< where `param` is a DTensor
};

at::Tensor tensor_in(const py::dict& state, const std::string& key, std::size_t index,
                     Shards* shards) {
  PyObject* value = PyDict_GetItemString(state.ptr(), key.c_str());
  if (value == nullptr || value == Py_None) return {};
  TORCH_CHECK_TYPE(THPVariable_Check(value), "FusedStep: expected states[", index, "]['", key,
                   "'] to be a tensor, got ", Py_TYPE(value)->tp_name);
  return shards == nullptr ? THPVariable_Unpack(value) : shards->local(value);
}

HyperParam hyper_param(py::handle value, const std::string& name, std::size_t group) {
  if (THPVariable_Check(value.ptr())) {
    const at::Tensor& tensor = THPVariable_Unpack(value.ptr());
    // A host tensor is read here: kernels of any device take a number.
    const bool number = tensor.numel() == 1 &&
                        (tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kDouble);
    if (number && tensor.is_cpu()) return tensor.item<double>();
    return tensor;
  }
  const double number = PyFloat_AsDouble(value.ptr());
  if (number == -1.0 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    TORCH_CHECK_TYPE(false, "FusedStep: expected ", name, " of group ", group,
                     " to be a number or a tensor, got ", Py_TYPE(value.ptr())->tp_name);
  }
  return number;
}

class PyFusedStep {
 public:
  explicit PyFusedStep(const std::string& algorithm) : native_(algorithm) {}

  const std::vector<std::string>& hyper_param_names() const { return native_.hyper_param_names(); }
  const std::vector<std::string>& state_names() const { return native_.state_names(); }
  std::vector<std::string> tensor_state_names() const {
    const std::vector<std::string>& names = native_.state_names();
    return {names.end() - static_cast<std::ptrdiff_t>(native_.num_tensor_states()), names.end()};
  }

  void plan(const py::list& params, const py::list& states, const std::vector<std::int64_t>& groups,
            const std::optional<py::dict>& owner, const std::vector<bool>& stochastic,
            const std::vector<std::optional<std::vector<std::string>>>& shard_groups);
  bool step(const py::list& groups, const FusedStepOptions& options,
            const std::optional<py::dict>& owner, const std::optional<py::list>& param_lists);

  void reset() {
    native_.reset();
    entries_.clear();
    owner_items_ = DictItems();
  }
  bool planned() const { return native_.planned(); }

  std::optional<at::Tensor> total_norm() const { return defined_or_none(native_.total_norm()); }
  std::optional<at::Tensor> skipped() const { return defined_or_none(native_.skipped()); }

 private:
  static std::optional<at::Tensor> defined_or_none(const at::Tensor& tensor) {
    return tensor.defined() ? std::make_optional(tensor) : std::nullopt;
  }

  FusedSlot slot(const Entry& entry, std::size_t index, std::int64_t group) const;
  bool fits(const std::optional<py::dict>& owner, const std::optional<py::list>& param_lists) const;
  bool same_params(const py::list& param_lists) const;
  void fetch_ahead(std::size_t index) const;
  std::vector<std::vector<HyperParam>> hyper_params(const py::list& groups) const;

  FusedStep native_;
  std::vector<Entry> entries_;
  DictItems owner_items_;  ///< of optimizer.state, where the caller gives it
};

FusedSlot PyFusedStep::slot(const Entry& entry, std::size_t index, std::int64_t group) const {
  const auto state = py::reinterpret_borrow<py::dict>(entry.state);
  FusedSlot slot;
  Shards* shards = entry.shards.get();
  slot.param = shards == nullptr ? THPVariable_Unpack(entry.param.ptr()) : shards->param();
  for (const std::string& name : native_.state_names()) {
    slot.states.push_back(tensor_in(state, name, index, shards));
  }
  slot.master = tensor_in(state, "master_param", index, shards);
  if (!slot.master.defined()) slot.master = tensor_in(state, "param_remainder", index, shards);
  slot.step = tensor_in(state, "step", index, nullptr);
  slot.group = group;
  slot.index = static_cast<std::int64_t>(index);
  return slot;
}

void PyFusedStep::plan(const py::list& params, const py::list& states,
                       const std::vector<std::int64_t>& groups,
                       const std::optional<py::dict>& owner, const std::vector<bool>& stochastic,
                       const std::vector<std::optional<std::vector<std::string>>>& shard_groups) {
  TORCH_CHECK(params.size() == states.size() && params.size() == groups.size(),
              "FusedStep: expected params, states and groups to have one length, got ",
              params.size(), ", ", states.size(), " and ", groups.size());
  std::vector<Entry> entries;
  std::vector<FusedSlot> slots;
  entries.reserve(params.size());
  slots.reserve(params.size());
  for (std::size_t i = 0; i < params.size(); ++i) {
    Entry entry;
    entry.param = params[i];
    TORCH_CHECK_TYPE(THPVariable_Check(entry.param.ptr()), "FusedStep: expected params[", i,
                     "] to be a tensor, got ", Py_TYPE(entry.param.ptr())->tp_name);
    entry.impl = THPVariable_Unpack(entry.param.ptr()).unsafeGetTensorImpl();
    const py::object state = states[i];
    if (!state.is_none()) {
      TORCH_CHECK_TYPE(PyDict_Check(state.ptr()) != 0, "FusedStep: expected states[", i,
                       "] to be a dict or None, got ", Py_TYPE(state.ptr())->tp_name);
      entry.state = state;
      entry.items = DictItems(state);
      const bool is_dtensor = i < shard_groups.size() && shard_groups[i];
      if (is_dtensor) entry.shards = std::make_unique<Shards>(entry.param);
      slots.push_back(slot(entry, i, groups[i]));
      if (is_dtensor) slots.back().shard_groups = *shard_groups[i];
      const auto group = static_cast<std::size_t>(groups[i]);
      slots.back().stochastic_rounding = group < stochastic.size() && stochastic[group];
    }
    entries.push_back(std::move(entry));
  }
  native_.plan(std::move(slots));
  entries_ = std::move(entries);
  owner_items_ = owner ? DictItems(*owner) : DictItems();
}

bool PyFusedStep::same_params(const py::list& param_lists) const {
  std::size_t next = 0;
  for (const py::handle list : param_lists) {
    if (PyList_Check(list.ptr()) == 0) return false;
    const Py_ssize_t size = PyList_GET_SIZE(list.ptr());
    if (entries_.size() - next < static_cast<std::size_t>(size)) return false;
    for (Py_ssize_t i = 0; i < size; ++i, ++next) {
      if (PyList_GET_ITEM(list.ptr(), i) != entries_[next].param.ptr()) return false;
    }
  }
  return next == entries_.size();
}

/// Ten thousand parameters' dictionaries do not stay in the caches between steps; without this the
/// check waits for memory once per object.
void PyFusedStep::fetch_ahead(std::size_t index) const {
  constexpr std::size_t kObjects = 24;
  constexpr std::size_t kEntries = 12;
  if (index + kObjects >= entries_.size()) return;
  const Entry& far = entries_[index + kObjects];
  __builtin_prefetch(far.param.ptr());
  if (far.state) far.items.fetch_objects(far.state.ptr());
  const Entry& near = entries_[index + kEntries];
  if (near.state) DictItems::fetch_entries(near.state.ptr());
}

// See Note [Identity of optimizer state].
bool PyFusedStep::fits(const std::optional<py::dict>& owner,
                       const std::optional<py::list>& param_lists) const {
  if (!native_.planned()) return false;
  if (param_lists && !same_params(*param_lists)) return false;
  if (owner && !owner_items_.match(owner->ptr())) return false;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    fetch_ahead(i);
    const Entry& entry = entries_[i];
    const at::Tensor& param = THPVariable_Unpack(entry.param.ptr());
    if (param.unsafeGetTensorImpl() != entry.impl) return false;
    if (!entry.state) {
      if (param.mutable_grad().defined()) return false;
    } else if (!entry.items.match(entry.state.ptr())) {
      return false;
    } else if (entry.shards && !entry.shards->unchanged()) {
      return false;
    }
  }
  return true;
}

std::vector<std::vector<HyperParam>> PyFusedStep::hyper_params(const py::list& groups) const {
  const std::vector<std::string>& names = native_.hyper_param_names();
  std::vector<std::vector<HyperParam>> result;
  result.reserve(groups.size());
  for (const py::handle group : groups) {
    TORCH_CHECK_TYPE(PySequence_Check(group.ptr()) != 0, "FusedStep: expected groups[",
                     result.size(), "] to be a sequence, got ", Py_TYPE(group.ptr())->tp_name);
    const auto values = py::reinterpret_borrow<py::sequence>(group);
    TORCH_CHECK(values.size() == names.size(), "FusedStep: expected groups[", result.size(),
                "] to hold ", names.size(), " values, got ", values.size());
    std::vector<HyperParam> converted;
    converted.reserve(names.size());
    for (std::size_t i = 0; i < names.size(); ++i) {
      const py::object value = values[i];
      converted.push_back(hyper_param(value, names[i], result.size()));
    }
    result.push_back(std::move(converted));
  }
  return result;
}

bool PyFusedStep::step(const py::list& groups, const FusedStepOptions& options,
                       const std::optional<py::dict>& owner,
                       const std::optional<py::list>& param_lists) {
  if (!fits(owner, param_lists)) return false;
  const std::vector<std::vector<HyperParam>> values = hyper_params(groups);
  LentGradients lent;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    if (entries_[i].shards) lent.lend(entries_[i].param, entries_[i].shards->param(), i);
  }
  {
    // Nothing in here touches a Python object.
    const py::gil_scoped_release released;
    native_.step(values, options);
  }
  lent.mark_written(options.write_back_grads);
  return true;
}

}  // namespace

void bind_optim(py::module_& module) {
  py::class_<PyFusedStep>(module, "FusedStep", "The native step of one optimizer.")
      .def(py::init<const std::string&>(), py::arg("algorithm"))
      .def_property_readonly("hyper_param_names", &PyFusedStep::hyper_param_names)
      .def_property_readonly("state_names", &PyFusedStep::state_names)
      .def_property_readonly("tensor_state_names", &PyFusedStep::tensor_state_names)
      .def_property_readonly("planned", &PyFusedStep::planned)
      .def("plan", &PyFusedStep::plan, py::arg("params"), py::arg("states"), py::arg("groups"),
           py::arg("owner") = py::none(), py::arg("stochastic") = std::vector<bool>(),
           py::arg("shard_groups") = std::vector<std::optional<std::vector<std::string>>>())
      .def(
          "step",
          [](PyFusedStep& self, const py::list& groups, const std::optional<at::Tensor>& grad_scale,
             const std::optional<at::Tensor>& found_inf, bool check_inside,
             std::optional<double> max_grad_norm, bool write_back_grads, std::int64_t seed,
             const std::optional<py::dict>& owner, const std::optional<py::list>& param_lists) {
            FusedStepOptions options;
            options.grad_scale = grad_scale;
            options.found_inf = found_inf;
            options.check_inside = check_inside;
            options.max_grad_norm = max_grad_norm;
            options.write_back_grads = write_back_grads;
            options.seed = seed;
            return self.step(groups, options, owner, param_lists);
          },
          py::arg("groups"), py::arg("grad_scale") = py::none(), py::arg("found_inf") = py::none(),
          py::arg("check_inside") = false, py::arg("max_grad_norm") = py::none(),
          py::arg("write_back_grads") = false, py::arg("seed") = 0, py::arg("owner") = py::none(),
          py::arg("param_lists") = py::none())
      .def("reset", &PyFusedStep::reset)
      .def("total_norm", &PyFusedStep::total_norm)
      .def("skipped", &PyFusedStep::skipped);
}

}  // namespace torchfuse::bindings
