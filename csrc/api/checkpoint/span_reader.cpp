// SPDX-License-Identifier: BSD-3-Clause
#include "api/checkpoint/span_reader.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "api/checkpoint/container.h"
#include "api/checkpoint/saved_files.h"

namespace torchfuse::checkpoint {

namespace {

/// The tensor under these keys in the file of a rank.
at::Tensor tensor_at(const c10::IValue& contents, const SpanReader::Keys& keys,
                     const std::string& where) {
  c10::IValue value = contents;
  std::string path = where;
  for (const c10::IValue& key : keys) {
    value = entry(as_dict(value, path + " to hold parts"), key, path);
    path += "[" + key_name(key) + "]";
  }
  TORCH_CHECK_VALUE(value.isTensor(), path, " to be a tensor, got a ", type_name(value), ".");
  return value.toTensor();
}

}  // namespace

SpanReader::SpanReader(std::string folder, const c10::IValue& files, std::string caller)
    : folder_(std::move(folder)), caller_(std::move(caller)) {
  const std::string index = caller_ + ": expected " + folder_ + "/index.pt to hold ";
  TORCH_CHECK_VALUE(files.isList(), index, "a list of files, got a ", type_name(files), ".");
  for (const c10::IValue& each : files.toList()) {
    const bool is_pair = each.isTuple() && each.toTupleRef().elements().size() == 2 &&
                         each.toTupleRef().elements()[0].isString() &&
                         each.toTupleRef().elements()[1].isInt();
    TORCH_CHECK_VALUE(is_pair, index, "pairs of the names of files and bytes, got a ",
                      type_name(each), ".");
    const std::string& name = each.toTupleRef().elements()[0].toStringRef();
    const std::int64_t bytes = each.toTupleRef().elements()[1].toInt();
    TORCH_CHECK_VALUE(name.find('/') == std::string::npos, index, "names of files beside it, got ",
                      name, ".");
    paths_.push_back(folder_ + "/" + name);
    const auto found = bytes_of(paths_.back());
    TORCH_CHECK_VALUE(found == bytes, caller_, ": expected ", paths_.back(), " to be a file of ",
                      bytes, " bytes, as index.pt says, got ",
                      found ? std::to_string(*found) + " bytes" : "none",
                      ". Load another checkpoint, or this one again if it was saved meanwhile.");
  }
}

at::Tensor SpanReader::want(const PlacedTensor& placed, const Keys& keys, std::int64_t begin,
                            std::int64_t end) {
  at::Tensor elements = at::empty({end - begin}, at::TensorOptions(placed.dtype).device(at::kCPU));
  for (const PlacedTensor::Span& span : placed.spans) {
    const std::int64_t first = std::max(begin, span.begin);
    const std::int64_t last = std::min(end, span.end);
    if (first >= last) continue;
    wanted_[span.file].push_back(
        {keys, span, first, elements.narrow(0, first - begin, last - first)});
  }
  return elements;
}

at::Tensor SpanReader::want(const PlacedTensor& placed, const Keys& keys) {
  return want(placed, keys, 0, placed.numel()).as_strided(placed.sizes, placed.strides);
}

void SpanReader::read() {
  const auto wanted = std::exchange(wanted_, {});
  for (const auto& [file, of_file] : wanted) {
    const Container container(paths_[file], caller_);
    const std::string where = caller_ + ": expected " + paths_[file];
    for (const Wanted& each : of_file) {
      const at::Tensor part = tensor_at(container.value(), each.keys, where);
      const std::int64_t numel = each.span.end - each.span.begin;
      const bool fits = part.dim() == 1 && part.numel() == numel && part.is_contiguous() &&
                        part.scalar_type() == each.target.scalar_type();
      TORCH_CHECK_VALUE(fits, where, "[", key_name(each.keys[0]), "][", key_name(each.keys[1]),
                        "][", key_name(each.keys[2]), "] to have ", numel, " elements of ",
                        each.target.scalar_type(), ", as index.pt says, got ", part.sizes(), " of ",
                        part.scalar_type(), ".");
      const at::Tensor values = container.read(part);
      each.target.copy_(values.narrow(0, each.begin - each.span.begin, each.target.numel()));
    }
  }
}

}  // namespace torchfuse::checkpoint
