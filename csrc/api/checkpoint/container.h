// SPDX-License-Identifier: BSD-3-Clause
// One plain value in a file of torch's format, with all tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <string>

#include "api/checkpoint/atomic_file.h"

namespace torchfuse::checkpoint {

/// Writes a file that torch.load(path, weights_only=True) reads, in one step: see AtomicFile and
/// Link.
void write_container(const std::string& path, const c10::IValue& value, const std::string& caller,
                     Link link = Link::kFollow);

/// Reads what write_container() or Python's torch.save wrote, with all tensors on the CPU.
/// @throws c10::ValueError naming the file if it is not there, truncated, damaged or of another
/// kind.
c10::IValue read_container(const std::string& path, const std::string& caller);

/// A file of write_container() whose tensors are read one by one.
class Container {
 public:
  /// Reads everything but the tensors' bytes; throws as read_container() does.
  Container(const std::string& path, const std::string& caller);
  ~Container();
  Container(const Container&) = delete;
  Container& operator=(const Container&) = delete;

  /// What the file holds, with tensors that have no values: they are on the meta device.
  const c10::IValue& value() const;
  /// A tensor of value(), with its values.
  at::Tensor read(const at::Tensor& tensor) const;

 private:
  class Tensors;
  std::unique_ptr<Tensors> tensors_;
};

}  // namespace torchfuse::checkpoint
