// SPDX-License-Identifier: BSD-3-Clause
// The records of a file in torch's format: a pickle, and the bytes of tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <caffe2/serialize/inline_container.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>

#include "api/checkpoint/pickle_reader.h"

namespace torchfuse::checkpoint {

class Records {
 public:
  /// Opens a file; throws c10::ValueError as read_container() does.
  Records(const std::string& path, const std::string& caller);

  /// The value that was written, with storages that `read_storage` returns. It is called once for
  /// each, although several tensors may have it.
  c10::IValue value(const ReadStorage& read_storage) const;
  /// A storage, after comparing its bytes with what the file's list says of them.
  at::Tensor storage(const std::string& key, at::ScalarType dtype, std::int64_t numel) const;

 private:
  std::string text_record(const std::string& name) const;
  void compare(const std::string& record, const void* data, std::size_t size) const;

  std::string where_;
  std::unique_ptr<caffe2::serialize::PyTorchStreamReader> reader_;
  std::unordered_map<std::string, std::uint32_t> sums_;  ///< CRC-32s of the records
  std::string pickle_;
};

}  // namespace torchfuse::checkpoint
