// SPDX-License-Identifier: BSD-3-Clause
// Parts of a checkpoint that save themselves to torch's archives.
#include <c10/util/Exception.h>

#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "api/checkpoint/parts.h"

namespace torchfuse::checkpoint {

namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;
using Save = std::function<void(OutputArchive&)>;

/// Returns the value with typed lists. Archives need a list's element type, which a plain list does
/// not store.
c10::IValue typed(const c10::IValue& value, const std::string& where) {
  if (value.isTuple()) {
    std::vector<c10::IValue> elements;
    for (const c10::IValue& element : value.toTupleRef().elements()) {
      elements.push_back(typed(element, where));
    }
    return c10::ivalue::Tuple::create(std::move(elements));
  }
  if (!value.isList() && !value.isGenericDict()) return value;
  const auto refuse = [&] {
    TORCH_CHECK_VALUE(false, where,
                      " to be None, a bool, int, float, string or tensor, a list of one such type, "
                      "or a tuple of these, got a value of type ",
                      value.type()->annotation_str(), ". Write a nested archive.");
  };
  if (value.isGenericDict()) refuse();
  const auto list = value.toList();
  const auto all = [&](bool (c10::IValue::*is)() const) {
    for (const c10::IValue& element : list) {
      if (!(element.*is)()) return false;
    }
    return !list.empty();
  };
  const auto fill = [&](auto typed_list) {
    using Element = typename decltype(typed_list)::value_type;
    for (const c10::IValue& element : list) typed_list.push_back(element.to<Element>());
    return c10::IValue(typed_list);
  };
  if (all(&c10::IValue::isInt)) return fill(c10::List<std::int64_t>());
  if (all(&c10::IValue::isBool)) return fill(c10::List<bool>());
  if (all(&c10::IValue::isString)) return fill(c10::List<std::string>());
  if (all(&c10::IValue::isTensor)) return fill(c10::List<at::Tensor>());
  if (!list.empty() && !all(&c10::IValue::isDouble)) refuse();
  return fill(c10::List<double>());
}

Dict dict_of(InputArchive& archive) {
  Dict dict = make_dict();
  for (const std::string& key : archive.keys()) {
    c10::IValue value;
    archive.read(key, value);
    if (value.isModule()) {
      InputArchive nested;
      archive.read(key, nested);
      value = dict_of(nested);
    } else {
      value = typed(value, "expected the archive's " + key_name(key));
    }
    dict.insert_or_assign(key, value);
  }
  return dict;
}

void write_dict(OutputArchive& archive, const Dict& dict) {
  for (const auto& item : dict) {
    TORCH_CHECK_VALUE(item.key().isString(), "expected the state to have strings as keys, got a ",
                      type_name(item.key()), ".");
    if (item.value().isGenericDict()) {
      OutputArchive nested(archive.compilation_unit());
      write_dict(nested, item.value().toGenericDict());
      archive.write(item.key().toStringRef(), nested);
    } else {
      archive.write(item.key().toStringRef(),
                    typed(item.value(), "expected the state's " + key_name(item.key())));
    }
  }
}

/// Runs a save function and returns an archive to read from. The values pass through memory,
/// because one class fills archives and another reads them.
std::shared_ptr<InputArchive> archive_of(const Save& save) {
  OutputArchive written;
  save(written);
  std::stringstream stream;
  written.save_to(stream);
  auto archive = std::make_shared<InputArchive>();
  archive->load_from(stream);
  return archive;
}

}  // namespace

CheckpointPart archived_part(Save save, std::function<void(InputArchive&)> load) {
  const auto to_dict = [save]() -> c10::IValue { return dict_of(*archive_of(save)); };
  const auto prepare = [save, load](const c10::IValue& value) -> std::function<void()> {
    const Dict saved = as_dict(value, "expected the state");
    const auto archive = archive_of([&](OutputArchive& written) { write_dict(written, saved); });
    // Only the object can check the values, so load the new values, and then restore the old.
    const auto own = archive_of(save);
    load(*archive);
    load(*own);
    return [load, archive] { load(*archive); };
  };
  return {to_dict, prepare};
}

}  // namespace torchfuse::checkpoint
