// SPDX-License-Identifier: BSD-3-Clause
#include "api/checkpoint/contents.h"

#include <c10/util/Exception.h>

namespace torchfuse::checkpoint {

Dict checked_contents(const c10::IValue& value, const std::string& where) {
  const Dict contents = as_dict(value, where + " to hold a checkpoint");
  TORCH_CHECK_VALUE(contents.contains("torchfuse"), where,
                    " to be a file of save_checkpoint, got one that holds ", listed(contents), ".");
  const Dict torchfuse = as_dict(contents.at("torchfuse"), where + " to hold 'torchfuse'");
  const c10::IValue format = entry(torchfuse, "format", where + "['torchfuse']");
  TORCH_CHECK_VALUE(format.isInt() && format.toInt() == kFormat, where, " to be of format ",
                    kFormat, ", got ",
                    format.isInt() ? std::to_string(format.toInt()) : type_name(format),
                    ". Read it with the version that wrote it.");
  return contents;
}

std::optional<std::string> class_of(const Dict& contents, const std::string& part) {
  const Dict torchfuse = contents.at("torchfuse").toGenericDict();
  const auto classes = torchfuse.find("classes");
  if (classes == torchfuse.end() || !classes->value().isGenericDict()) return std::nullopt;
  const Dict names = classes->value().toGenericDict();
  const auto found = names.find(part);
  if (found == names.end() || !found->value().isString()) return std::nullopt;
  return found->value().toStringRef();
}

}  // namespace torchfuse::checkpoint
