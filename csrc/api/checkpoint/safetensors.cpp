// SPDX-License-Identifier: BSD-3-Clause
#include "api/checkpoint/safetensors.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <tuple>

#include "api/checkpoint/atomic_file.h"
#include "api/checkpoint/input_file.h"
#include "api/checkpoint/safetensors_header.h"
#include "api/checkpoint/values.h"

namespace torchfuse::checkpoint {

namespace {

static_assert(std::endian::native == std::endian::little);
constexpr std::uint64_t kLengthBytes = 8;

using Named = std::pair<std::string, at::Tensor>;

std::vector<Named> in_order(std::vector<Named> tensors) {
  std::sort(tensors.begin(), tensors.end(), [](const Named& left, const Named& right) {
    const auto first = right.second.element_size();
    const auto second = left.second.element_size();
    return std::tie(first, left.first) < std::tie(second, right.first);
  });
  return tensors;
}

void check_tensor(const Named& named, const std::string& caller) {
  const auto& [name, tensor] = named;
  const std::string where = caller + ": expected '" + name + "'";
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided && !tensor.is_meta(), where,
                    " to be a dense tensor with memory, got one of layout ", tensor.layout(),
                    " on ", tensor.device(), ".");
  TORCH_CHECK_VALUE(dtype_name(tensor.scalar_type()).has_value(), where,
                    " to have a dtype that safetensors files can hold, got ", tensor.scalar_type(),
                    ". Convert it, or use save_checkpoint.");
  TORCH_CHECK_VALUE(name != "__metadata__", where,
                    " to have another name: the format reserves this name.");
  TORCH_CHECK_VALUE(is_utf8(name), where, " to have a name in UTF-8, got other bytes.");
}

/// Returns the header's length and the header, padded with spaces so that tensors are aligned.
std::string header_bytes(const std::vector<Named>& tensors,
                         const std::map<std::string, std::string>& metadata) {
  SafetensorsHeader header{{}, metadata};
  std::uint64_t next = 0;
  for (const auto& [name, tensor] : tensors) {
    const std::uint64_t end = next + tensor.numel() * tensor.element_size();
    header.tensors.push_back({name, tensor.scalar_type(), tensor.sizes().vec(), next, end});
    next = end;
  }
  std::string json = to_json(header);
  json.resize((json.size() + kLengthBytes - 1) / kLengthBytes * kLengthBytes, ' ');
  const std::uint64_t length = json.size();
  return std::string(reinterpret_cast<const char*>(&length), kLengthBytes) + json;
}

NamedWeights read(const InputFile& file) {
  std::uint64_t place = 0;
  const auto left = [&] { return file.size() - place; };
  const auto take = [&](void* target, std::uint64_t size) {
    TORCH_CHECK(size <= left(), "expected ", size, " more bytes, got ", left());
    TORCH_CHECK(file.read(place, target, size) == size, "it could not be read to its end");
    place += size;
  };
  std::uint64_t size = 0;
  take(&size, kLengthBytes);
  TORCH_CHECK(size <= std::min(kMostHeaderBytes, left()),
              "its first eight bytes announce a header of ", size, " bytes");
  std::string text(size, '\0');
  take(text.data(), size);
  const SafetensorsHeader header = parse_header(text, left());
  NamedWeights weights{{}, header.metadata};
  for (const TensorEntry& entry : header.tensors) {
    at::Tensor tensor = at::empty(entry.shape, at::TensorOptions(entry.dtype).device(at::kCPU));
    take(tensor.mutable_data_ptr(), entry.end - entry.begin);
    weights.tensors.emplace_back(entry.name, std::move(tensor));
  }
  return weights;
}

}  // namespace

void write_safetensors(const std::string& path, const NamedWeights& weights,
                       const std::string& caller) {
  for (const Named& named : weights.tensors) check_tensor(named, caller);
  for (const auto& [key, text] : weights.metadata) {
    TORCH_CHECK_VALUE(is_utf8(key) && is_utf8(text), caller, ": expected metadata '", key,
                      "' to be text in UTF-8, got other bytes.");
  }
  const std::vector<Named> tensors = in_order(weights.tensors);
  const std::string header = header_bytes(tensors, weights.metadata);
  TORCH_CHECK_VALUE(header.size() - kLengthBytes <= kMostHeaderBytes, caller,
                    ": expected names and metadata of at most ", kMostHeaderBytes, " bytes, got ",
                    header.size(), ".");
  AtomicFile file(caller, path);
  file.write(header.data(), header.size());
  for (const auto& [name, tensor] : tensors) {
    // Copy one tensor at a time, to need little memory on the host.
    const at::Tensor plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous();
    file.write(plain.const_data_ptr(), plain.nbytes());
    file.check();
  }
  file.commit();
}

NamedWeights read_safetensors(const std::string& path, const std::string& caller) {
  const at::NoGradGuard no_grad;
  const InputFile file(caller, path);
  return file.whole("a whole safetensors file, got a truncated one or one of another kind",
                    [&] { return read(file); });
}

}  // namespace torchfuse::checkpoint
