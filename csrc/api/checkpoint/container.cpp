// SPDX-License-Identifier: BSD-3-Clause
#include "api/checkpoint/container.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <caffe2/serialize/inline_container.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "api/checkpoint/atomic_file.h"
#include "api/checkpoint/pickle_reader.h"
#include "api/checkpoint/pickle_writer.h"
#include "api/checkpoint/record_sums.h"
#include "api/checkpoint/values.h"

namespace torchfuse::checkpoint {

namespace {

using caffe2::serialize::PyTorchStreamReader;
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

/// Compares the bytes of records with what the file's list says of them.
class RecordSums {
 public:
  RecordSums(const std::string& path, std::string where)
      : sums_(listed_sums(path)), where_(std::move(where)) {}

  void compare(const std::string& record, const void* data, std::size_t size) const {
    const auto listed = sums_.find(record);
    // torch.serialization.set_crc32_options(False) leaves zeros.
    if (listed == sums_.end() || listed->second == 0) return;
    TORCH_CHECK_VALUE(listed->second == crc32(data, size), where_, " to hold ", record,
                      " as it was written, got other bytes: the file is damaged. Load another "
                      "checkpoint.");
  }

 private:
  std::unordered_map<std::string, std::uint32_t> sums_;
  std::string where_;
};

class Storages {
 public:
  Storages(PyTorchStreamReader& reader, const RecordSums& sums, std::string where)
      : reader_(reader), sums_(sums), where_(std::move(where)) {}

  at::Tensor operator()(const std::string& key, at::ScalarType dtype, std::int64_t numel) {
    const auto known = storages_.find(key);
    if (known != storages_.end()) {
      TORCH_CHECK_VALUE(known->second.scalar_type() == dtype && known->second.numel() == numel,
                        where_, " to hold storage ", key, " of one dtype, got two.");
      return known->second;
    }
    const std::string record = "data/" + key;
    TORCH_CHECK_VALUE(reader_.hasRecord(record), where_, " to hold ", record, ", got none.");
    const std::size_t size = reader_.getRecordSize(record);
    TORCH_CHECK_VALUE(numel >= 0 && size % c10::elementSize(dtype) == 0 &&
                          size / c10::elementSize(dtype) == static_cast<std::size_t>(numel),
                      where_, " to hold ", numel, " elements of ", dtype, " in ", record, ", got ",
                      size, " bytes.");
    at::Tensor storage = at::empty({numel}, at::TensorOptions(dtype).device(at::kCPU));
    if (size > 0) reader_.getRecord(record, storage.mutable_data_ptr(), size);
    sums_.compare(record, storage.const_data_ptr(), size);
    storages_.emplace(key, storage);
    return storage;
  }

 private:
  PyTorchStreamReader& reader_;
  const RecordSums& sums_;
  std::string where_;
  std::unordered_map<std::string, at::Tensor> storages_;
};

/// Without the period of a sentence.
std::string first_line(const std::string& text) {
  const std::string line = text.substr(0, text.find('\n'));
  return line.ends_with('.') ? line.substr(0, line.size() - 1) : line;
}

std::string text_record(PyTorchStreamReader& reader, const std::string& name) {
  const auto [data, size] = reader.getRecord(name);
  return {static_cast<const char*>(data.get()), size};
}

}  // namespace

void write_container(const std::string& path, const c10::IValue& value, const std::string& caller) {
  const Pickle pickle = to_pickle(value, caller + ": expected the checkpoint");
  AtomicFile file(caller, path);
  write_records(file, pickle);
  file.commit();
}

c10::IValue read_container(const std::string& path, const std::string& caller) {
  const at::NoGradGuard no_grad;
  struct stat found{};
  TORCH_CHECK_VALUE(::stat(path.c_str(), &found) == 0, caller, ": expected ", path,
                    " to be a file, got none.");
  TORCH_CHECK_VALUE(!S_ISDIR(found.st_mode), caller, ": expected ", path,
                    " to be a file, got a folder. Name the file in it.");
  const std::string where = caller + ": expected " + path;
  std::unique_ptr<PyTorchStreamReader> reader;
  std::optional<RecordSums> sums;
  std::string pickle;
  try {
    reader = std::make_unique<PyTorchStreamReader>(path);
    TORCH_CHECK(reader->hasRecord("data.pkl"), "it holds no data.pkl");
    TORCH_CHECK(!reader->hasRecord("constants.pkl"),
                "it is an archive of TorchScript, as torch::save writes it");
    TORCH_CHECK(!reader->hasRecord("byteorder") || text_record(*reader, "byteorder") == "little",
                "its numbers are big-endian");
    pickle = text_record(*reader, "data.pkl");
    sums.emplace(path, where);
  } catch (const std::exception& reason) {
    TORCH_CHECK_VALUE(
        false, where,
        " to be a whole file of torch.save or save_checkpoint, got a truncated one or "
        "one of another kind: ",
        first_line(message_of(reason)), ". Load another checkpoint.");
  }
  try {
    sums->compare("data.pkl", pickle.data(), pickle.size());
    return from_pickle(pickle, Storages(*reader, *sums, where), where);
  } catch (const c10::ValueError&) {
    throw;
  } catch (const std::exception& reason) {
    C10_THROW_ERROR(ValueError, where + " to be a whole file, got a damaged one: " +
                                    first_line(message_of(reason)) + ".");
  }
}

}  // namespace torchfuse::checkpoint
