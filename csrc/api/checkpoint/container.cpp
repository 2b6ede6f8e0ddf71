// SPDX-License-Identifier: BSD-3-Clause
#include "api/checkpoint/container.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <caffe2/serialize/inline_container.h>

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "api/checkpoint/atomic_file.h"
#include "api/checkpoint/pickle_writer.h"
#include "api/checkpoint/records.h"

namespace torchfuse::checkpoint {

namespace {

using caffe2::serialize::PyTorchStreamWriter;

void write_records(AtomicFile& file, const Pickle& pickle) {
  PyTorchStreamWriter writer([&](const void* data, std::size_t size) {
    file.write(data, size);
    return size;
  });
  writer.writeRecord("data.pkl", pickle.bytes.data(), pickle.bytes.size());
  writer.writeRecord("byteorder", "little", 6);
  for (std::size_t key = 0; key < pickle.tensors.size(); ++key) {
    // One tensor at a time leaves its device.
    const at::Tensor tensor = pickle.tensors[key].cpu();
    writer.writeRecord("data/" + std::to_string(key), tensor.const_data_ptr(), tensor.nbytes());
    file.check();
  }
  writer.writeEndOfFile();
}

}  // namespace

void write_container(const std::string& path, const c10::IValue& value, const std::string& caller,
                     Link link) {
  const Pickle pickle = to_pickle(value, caller + ": expected the checkpoint");
  AtomicFile file(caller, path, link);
  write_records(file, pickle);
  file.commit();
}

c10::IValue read_container(const std::string& path, const std::string& caller) {
  const at::NoGradGuard no_grad;
  const Records records(path, caller);
  return records.value([&](const std::string& key, at::ScalarType dtype, std::int64_t numel) {
    return records.storage(key, dtype, numel);
  });
}

class Container::Tensors {
 public:
  Tensors(const std::string& path, const std::string& caller) : records_(path, caller) {
    const at::NoGradGuard no_grad;
    const auto shape_of = [&](const std::string& key, at::ScalarType dtype, std::int64_t numel) {
      const at::Tensor storage = at::empty({numel}, at::TensorOptions(dtype).device(at::kMeta));
      keys_[storage.storage().unsafeGetStorageImpl()] = key;
      return storage;
    };
    value_ = records_.value(shape_of);
  }

  const c10::IValue& value() const { return value_; }

  at::Tensor read(const at::Tensor& tensor) const {
    const at::NoGradGuard no_grad;
    const c10::Storage& storage = tensor.storage();
    const auto numel = static_cast<std::int64_t>(storage.nbytes() / tensor.itemsize());
    return records_.storage(keys_.at(storage.unsafeGetStorageImpl()), tensor.scalar_type(), numel)
        .as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  }

 private:
  Records records_;
  c10::IValue value_;
  std::unordered_map<const c10::StorageImpl*, std::string> keys_;
};

Container::Container(const std::string& path, const std::string& caller)
    : tensors_(std::make_unique<Tensors>(path, caller)) {}

Container::~Container() = default;

const c10::IValue& Container::value() const { return tensors_->value(); }

at::Tensor Container::read(const at::Tensor& tensor) const { return tensors_->read(tensor); }

}  // namespace torchfuse::checkpoint
