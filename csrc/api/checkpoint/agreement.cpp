// SPDX-License-Identifier: BSD-3-Clause
#include "api/checkpoint/agreement.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <torchfuse/collectives.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "api/checkpoint/values.h"

namespace torchfuse::checkpoint {

Ranks::Ranks(c10::intrusive_ptr<c10d::ProcessGroup> group, std::string caller)
    : group_(std::move(group)), caller_(std::move(caller)) {}

std::int64_t Ranks::rank() const { return group_ ? group_->getRank() : 0; }

std::int64_t Ranks::size() const { return group_ ? group_->getSize() : 1; }

at::DeviceType Ranks::device() const {
  const auto devices = group_->getDeviceTypes();
  return std::find(devices.begin(), devices.end(), at::kCPU) != devices.end() ? at::kCPU
                                                                              : at::kCUDA;
}

std::optional<std::chrono::milliseconds> Ranks::timeout() const {
  if (!group_) return std::nullopt;
  try {
    return group_->getBackend(device())->getBackendOptions()->timeout;
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

std::vector<std::string> Ranks::gather(const std::string& mine) const {
  if (!group_) return {mine};
  const auto summed = [&](at::Tensor tensor) {
    tensor = tensor.to(device());
    all_reduce_sum_(tensor, group_->getGroupName(), caller_ + ", which all ranks must call");
    return tensor.cpu();
  };
  at::Tensor sizes = at::zeros({size()}, at::kLong);
  sizes[rank()] = static_cast<std::int64_t>(mine.size());
  sizes = summed(sizes);
  at::Tensor bytes = at::zeros({sizes.sum().item<std::int64_t>()}, at::kByte);
  const auto* lengths = sizes.const_data_ptr<std::int64_t>();
  std::int64_t first = 0;
  for (std::int64_t i = 0; i < rank(); ++i) first += lengths[i];
  if (!mine.empty()) std::memcpy(bytes.data_ptr<std::uint8_t>() + first, mine.data(), mine.size());
  // Nothing to say is the usual case.
  if (bytes.numel() > 0) bytes = summed(bytes);
  std::vector<std::string> all;
  const char* next = reinterpret_cast<const char*>(bytes.const_data_ptr<std::uint8_t>());
  for (std::int64_t i = 0; i < size(); ++i) {
    all.emplace_back(next, static_cast<std::size_t>(lengths[i]));
    next += lengths[i];
  }
  return all;
}

void Ranks::agree(const std::string& error) const {
  for (const std::string& each : gather(error)) TORCH_CHECK_VALUE(each.empty(), each);
}

void Ranks::all_or_none(const std::function<void()>& action) const {
  std::string failure;
  try {
    action();
  } catch (const std::exception& error) {
    if (size() == 1) throw;
    failure = message_of(error);
  }
  agree(failure);
}

}  // namespace torchfuse::checkpoint
