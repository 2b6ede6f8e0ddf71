// SPDX-License-Identifier: BSD-3-Clause
// torchfuse._C.read_archive and write_archive: torch::serialize's archives as nested dictionaries,
// and what those of our C++ classes hold.
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/serialize/archive.h>

#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <cstdint>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <torchfuse/optim/optimizer_class.h>

#include "bindings/bindings.h"

namespace torchfuse::bindings {
namespace {

using optim::OptimizerClass;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

// --- Archives as dictionaries --------------------------------------------------------------------

py::object to_python(const c10::IValue& value, const std::string& key) {
  if (value.isNone()) return py::none();
  if (value.isBool()) return py::bool_(value.toBool());
  if (value.isInt()) return py::int_(value.toInt());
  if (value.isDouble()) return py::float_(value.toDouble());
  if (value.isString()) return py::str(value.toStringRef());
  if (value.isTensor()) return py::cast(value.toTensor());
  TORCH_CHECK_TYPE(value.isTuple(), "read_archive: expected the archive's ", key,
                   " to be a number, a string, a tensor, a tuple, none or a nested archive, got a "
                   "value of type ",
                   value.tagKind(), ".");
  const auto& elements = value.toTupleRef().elements();
  py::tuple tuple(elements.size());
  for (std::size_t i = 0; i < elements.size(); ++i) tuple[i] = to_python(elements[i], key);
  return tuple;
}

py::dict to_dict(InputArchive& archive) {
  py::dict values;
  for (const std::string& key : archive.keys()) {
    c10::IValue value;
    archive.read(key, value);
    if (value.isModule()) {
      InputArchive nested;
      archive.read(key, nested);
      values[py::str(key)] = to_dict(nested);
    } else {
      values[py::str(key)] = to_python(value, key);
    }
  }
  return values;
}

c10::IValue to_ivalue(const py::handle& value, const std::string& key) {
  PyObject* const object = value.ptr();
  if (value.is_none()) return {};
  if (PyBool_Check(object)) return value.cast<bool>();
  if (PyLong_Check(object) != 0) return value.cast<std::int64_t>();
  if (PyFloat_Check(object)) return value.cast<double>();
  if (PyUnicode_Check(object) != 0) return value.cast<std::string>();
  if (THPVariable_Check(object)) return THPVariable_Unpack(object).detach();
  TORCH_CHECK_TYPE(PyTuple_Check(object) != 0, "write_archive: expected ", key,
                   " to be a bool, int, float, str, tensor, tuple, dict or None, got ",
                   Py_TYPE(object)->tp_name, ".");
  std::vector<c10::IValue> elements;
  for (const py::handle element : py::reinterpret_borrow<py::tuple>(value)) {
    elements.push_back(to_ivalue(element, key));
  }
  return c10::ivalue::Tuple::create(std::move(elements));
}

void write_dict(OutputArchive& archive, const py::dict& values) {
  for (const auto& entry : values) {
    const auto key = entry.first.cast<std::string>();
    if (py::isinstance<py::dict>(entry.second)) {
      OutputArchive nested(archive.compilation_unit());
      write_dict(nested, py::reinterpret_borrow<py::dict>(entry.second));
      archive.write(key, nested);
    } else {
      archive.write(key, to_ivalue(entry.second, key));
    }
  }
}

py::dict read_archive(const std::string& path) {
  InputArchive archive;
  {
    const py::gil_scoped_release released;
    // An archive that was saved on a GPU can be read where there is none.
    archive.load_from(path, c10::Device(c10::kCPU));
  }
  return to_dict(archive);
}

void write_archive(const py::dict& values, const std::string& path) {
  OutputArchive archive;
  write_dict(archive, values);
  const py::gil_scoped_release released;
  archive.save_to(path);
}

// --- What the archives of our classes hold -------------------------------------------------------

std::vector<std::string> class_names() {
  std::vector<std::string> names;
  for (const OptimizerClass& listed : optim::optimizer_classes()) names.push_back(listed.name);
  return names;
}

OptimizerClass find_class(const std::string& name) {
  for (OptimizerClass& listed : optim::optimizer_classes()) {
    if (listed.name == name) return std::move(listed);
  }
  TORCH_CHECK_VALUE(false, "OptimizerClass: expected one of [", c10::Join(", ", class_names()),
                    "], got ", name, ".");
}

/// Archives are filled by one class and read by another, so the values pass through memory.
InputArchive reopened(OutputArchive& written) {
  std::stringstream stream;
  written.save_to(stream);
  InputArchive archive;
  archive.load_from(stream);
  return archive;
}

py::dict default_options(const OptimizerClass& optimizer_class) {
  OutputArchive written;
  optimizer_class.write_default_options(written);
  InputArchive archive = reopened(written);
  return to_dict(archive);
}

std::vector<std::string> required_states(const OptimizerClass& optimizer_class,
                                         const py::dict& options, const std::string& owner) {
  OutputArchive written;
  write_dict(written, options);
  InputArchive archive = reopened(written);
  return optimizer_class.required_states(archive, owner);
}

}  // namespace

void bind_archive(py::module_& module) {
  py::class_<OptimizerClass>(module, "OptimizerClass", "A C++ class, and what its archives hold.")
      .def(py::init(&find_class), py::arg("name"))
      .def_property_readonly("name", [](const OptimizerClass& self) { return self.name; })
      .def_property_readonly("algorithm", [](const OptimizerClass& self) { return self.algorithm; })
      .def_property_readonly("archive_format",
                             [](const OptimizerClass& self) { return self.archive_format; })
      .def_property_readonly("states", [](const OptimizerClass& self) { return self.states; })
      .def("default_options", &default_options)
      .def("required_states", &required_states, py::arg("options"), py::arg("owner"));
  module.def("optimizer_classes", &class_names, "Names of the C++ classes of optimizers.");
  module.def("read_archive", &read_archive, py::arg("path"),
             "The values of a C++ archive; its tensors are on the CPU.");
  module.def("write_archive", &write_archive, py::arg("values"), py::arg("path"),
             "Writes a C++ archive; nested dictionaries become nested archives.");
}

}  // namespace torchfuse::bindings
