// SPDX-License-Identifier: BSD-3-Clause
// Tensors of the CPU over the memory of CUDA tensors, and arguments made of them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <functional>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace pretended_cuda {

/// Tensors of the CPU with the memory, sizes, strides and bits of CUDA tensors. They do not keep
/// the memory alive: on a device, work that is queued does not either. Those of one storage share
/// one, so that ops see which of their arguments overlap.
class HostViews {
 public:
  at::Tensor of(const at::Tensor& cuda);

 private:
  std::unordered_map<const c10::StorageImpl*, c10::Storage> storages_;
};

/// One that shares with no other.
inline at::Tensor host_view(const at::Tensor& cuda) { return HostViews().of(cuda); }

/// Whether the memory is that of a CUDA device.
inline bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.is_cuda(); }

/// Gives a tensor the bits of another that are not in its memory: conjugated, negated, a number.
void copy_bits(const at::Tensor& from, const at::Tensor& to);

using TensorMap = std::function<at::Tensor(const at::Tensor&)>;

/// The value with each of its tensors replaced; lists and optional tensors too.
c10::IValue map_tensors(const c10::IValue& value, const TensorMap& map);
void for_each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit);

/// Which tensor stands for which.
class Pairs {
 public:
  void add(at::Tensor from, at::Tensor to) { pairs_.emplace_back(std::move(from), std::move(to)); }
  /// What stands for `tensor`, or null.
  [[nodiscard]] const at::Tensor* find(const at::Tensor& tensor) const;
  /// A tensor with the storage of one that something stands for: the same view of that. Undefined
  /// if there is none.
  [[nodiscard]] at::Tensor find_storage(const at::Tensor& tensor) const;
  [[nodiscard]] auto begin() const { return pairs_.begin(); }
  [[nodiscard]] auto end() const { return pairs_.end(); }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;
};

}  // namespace pretended_cuda
