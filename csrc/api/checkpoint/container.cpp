// SPDX-License-Identifier: BSD-3-Clause
#include "api/checkpoint/container.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <caffe2/serialize/inline_container.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <memory>
#include <unordered_map>

#include "api/checkpoint/atomic_file.h"
#include "api/checkpoint/input_file.h"
#include "api/checkpoint/pickle_reader.h"
#include "api/checkpoint/pickle_writer.h"

namespace torchfuse::checkpoint {

namespace {

using caffe2::serialize::PyTorchStreamWriter;

constexpr const char* kDamaged = "a whole file, got a damaged one";

using CrcTables = std::array<std::array<std::uint32_t, 256>, 8>;

/// Table k advances the CRC by one byte that is followed by k more bytes.
constexpr CrcTables make_crc_tables() {
  CrcTables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (0xedb88320U & (~(crc & 1U) + 1U));
    tables[0][byte] = crc;
  }
  for (std::size_t k = 1; k < tables.size(); ++k) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 0xffU];
    }
  }
  return tables;
}

std::string part_of(const InputFile& file, std::uint64_t at, std::uint64_t count) {
  TORCH_CHECK(at <= file.size() && count <= file.size() - at, "its list of records is not whole");
  std::string bytes(count, '\0');
  TORCH_CHECK(file.read(at, bytes.data(), count) == count, "its list of records is not whole");
  return bytes;
}

template <class Number>
Number number_at(const std::string& bytes, std::size_t at) {
  TORCH_CHECK(at + sizeof(Number) <= bytes.size(), "its list of records is not whole");
  Number number;
  std::memcpy(&number, bytes.data() + at, sizeof number);
  return number;
}

/// Returns a zip file's central directory, which the end of the file locates.
/// @throws c10::Error if the file contains none.
std::string list_of_entries(const InputFile& file) {
  constexpr std::uint64_t kEnd = 22;
  constexpr std::uint64_t kLocator = 20;
  constexpr std::uint64_t kEnd64 = 56;
  const std::uint64_t tail_size = std::min<std::uint64_t>(file.size(), kEnd + 0xffff + kLocator);
  const std::string tail = part_of(file, file.size() - tail_size, tail_size);
  const std::size_t end = tail.rfind("PK\x05\x06");
  TORCH_CHECK(end != std::string::npos, "it has no list of records");
  if (end >= kLocator && tail.compare(end - kLocator, 4, "PK\x06\x07") == 0) {
    const auto at = number_at<std::uint64_t>(tail, end - kLocator + 8);
    const std::string end64 = part_of(file, at, kEnd64);
    return part_of(file, number_at<std::uint64_t>(end64, 48), number_at<std::uint64_t>(end64, 40));
  }
  return part_of(file, number_at<std::uint32_t>(tail, end + 16),
                 number_at<std::uint32_t>(tail, end + 12));
}

/// Returns the CRC-32 that zip files use.
std::uint32_t crc32(const void* data, std::size_t size) {
  static constexpr CrcTables kTables = make_crc_tables();
  const auto* next = static_cast<const unsigned char*>(data);
  std::uint32_t crc = 0xffffffffU;
  for (; size >= 8; size -= 8, next += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, next, sizeof word);
    word ^= crc;
    crc = 0;
    for (std::size_t k = 0; k < 8; ++k) crc ^= kTables[7 - k][(word >> (8 * k)) & 0xffU];
  }
  for (; size > 0; --size) crc = (crc >> 8) ^ kTables[0][(crc ^ *next++) & 0xffU];
  return ~crc;
}

/// Returns the CRC-32s in a central directory, by entry name without the first folder. torch writes
/// these checksums but does not check them.
/// @throws c10::Error if the directory is truncated.
std::unordered_map<std::string, std::uint32_t> listed_sums(const std::string& list) {
  constexpr std::size_t kHeader = 46;
  std::unordered_map<std::string, std::uint32_t> sums;
  for (std::size_t at = 0; at + kHeader <= list.size();) {
    const std::size_t name_size = number_at<std::uint16_t>(list, at + 28);
    const std::string name = list.substr(at + kHeader, name_size);
    sums[name.substr(name.find('/') + 1)] = number_at<std::uint32_t>(list, at + 16);
    at += kHeader + name_size + number_at<std::uint16_t>(list, at + 30) +
          number_at<std::uint16_t>(list, at + 32);
  }
  return sums;
}

void write_records(AtomicFile& file, const Pickle& pickle) {
  PyTorchStreamWriter writer([&](const void* data, std::size_t size) {
    file.write(data, size);
    return size;
  });
  writer.writeRecord("data.pkl", pickle.bytes.data(), pickle.bytes.size());
  writer.writeRecord("byteorder", "little", 6);
  for (std::size_t key = 0; key < pickle.tensors.size(); ++key) {
    // Copy one tensor at a time, to need little memory on the host.
    const at::Tensor tensor = pickle.tensors[key].cpu();
    writer.writeRecord("data/" + std::to_string(key), tensor.const_data_ptr(), tensor.nbytes());
    file.check();
  }
  writer.writeEndOfFile();
}

/// The records of a file in torch's format: a pickle, and the tensors' bytes.
class Records {
 public:
  /// Opens a file. Throws the same errors as read_container().
  Records(const std::string& path, const std::string& caller);
  Container contents() const;

 private:
  std::string text_record(const std::string& name) const;
  /// Returns a storage, after comparing its bytes with the checksum in the file's directory.
  at::Tensor storage(const std::string& key, at::ScalarType dtype, std::int64_t numel) const;
  void compare(const std::string& record, const void* data, std::size_t size) const;

  std::string where_;
  std::shared_ptr<InputFile> file_;
  std::unique_ptr<caffe2::serialize::PyTorchStreamReader> reader_;
  std::unordered_map<std::string, std::uint32_t> sums_;  ///< CRC-32s by record
  std::string list_;                                     ///< the zip file's central directory
  std::string pickle_;
};

Records::Records(const std::string& path, const std::string& caller)
    : where_(caller + ": expected " + path), file_(std::make_shared<InputFile>(caller, path)) {
  const auto open = [&] {
    reader_ = std::make_unique<caffe2::serialize::PyTorchStreamReader>(file_);
    TORCH_CHECK(reader_->hasRecord("data.pkl"), "it holds no data.pkl");
    TORCH_CHECK(!reader_->hasRecord("constants.pkl"),
                "it is an archive of TorchScript, as torch::save writes it");
    TORCH_CHECK(!reader_->hasRecord("byteorder") || text_record("byteorder") == "little",
                "its numbers are big-endian");
    pickle_ = text_record("data.pkl");
    list_ = list_of_entries(*file_);
    sums_ = listed_sums(list_);
  };
  file_->whole(
      "a whole file of torch.save or save_checkpoint, got a truncated one or one of another kind",
      open, " Load another checkpoint.");
}

std::string Records::text_record(const std::string& name) const {
  const auto [data, size] = reader_->getRecord(name);
  return {static_cast<const char*>(data.get()), size};
}

void Records::compare(const std::string& record, const void* data, std::size_t size) const {
  const auto listed = sums_.find(record);
  // torch.serialization.set_crc32_options(False) writes zeros.
  if (listed == sums_.end() || listed->second == 0) return;
  TORCH_CHECK_VALUE(listed->second == crc32(data, size), where_, " to hold ", record,
                    " as it was written, got other bytes: the file is damaged. Load another "
                    "checkpoint.");
}

Container Records::contents() const {
  return file_->whole(kDamaged, [&]() -> Container {
    compare("data.pkl", pickle_.data(), pickle_.size());
    const std::uint64_t sum = crc32(pickle_.data(), pickle_.size());
    const auto read = [&](const std::string& key, at::ScalarType dtype, std::int64_t numel) {
      return storage(key, dtype, numel);
    };
    return {from_pickle(pickle_, read, where_), sum << 32 | crc32(list_.data(), list_.size())};
  });
}

at::Tensor Records::storage(const std::string& key, at::ScalarType dtype,
                            std::int64_t numel) const {
  const std::string record = "data/" + key;
  return file_->whole(kDamaged, [&] {
    TORCH_CHECK_VALUE(reader_->hasRecord(record), where_, " to hold ", record, ", got none.");
    const std::size_t size = reader_->getRecordSize(record);
    TORCH_CHECK_VALUE(numel >= 0 && size % c10::elementSize(dtype) == 0 &&
                          size / c10::elementSize(dtype) == static_cast<std::size_t>(numel),
                      where_, " to hold ", numel, " elements of ", dtype, " in ", record, ", got ",
                      size, " bytes.");
    at::Tensor storage = at::empty({numel}, at::TensorOptions(dtype).device(at::kCPU));
    if (size > 0) reader_->getRecord(record, storage.mutable_data_ptr(), size);
    compare(record, storage.const_data_ptr(), size);
    return storage;
  });
}

}  // namespace

void write_container(const std::string& path, const c10::IValue& value, const std::string& caller) {
  const Pickle pickle = to_pickle(value, caller + ": expected the checkpoint");
  AtomicFile file(caller, path);
  write_records(file, pickle);
  file.commit();
}

Container read_container(const std::string& path, const std::string& caller) {
  const at::NoGradGuard no_grad;
  return Records(path, caller).contents();
}

}  // namespace torchfuse::checkpoint
