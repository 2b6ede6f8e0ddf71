// SPDX-License-Identifier: BSD-3-Clause
#include "ops/multi_tensor/tensor_list.h"

#include <ATen/Functions.h>

namespace torchfuse::ops {

TensorList::TensorList(const char* op, const char* name, at::TensorList tensors) {
  if (!tensors.empty() && tensors[0].defined()) device_ = tensors[0].device();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Argument argument{op, name, static_cast<std::int64_t>(i)};
    const at::Tensor& tensor = tensors[i];
    check_tensor(argument, tensor);
    check_same_device(argument, tensor, device_, name);
    if (tensor.numel() == 0) continue;
    at::Tensor dense = tensor;
    if (!tensor.is_non_overlapping_and_dense() || tensor.is_neg()) {
      dense = at::empty(tensor.sizes(), tensor.options().requires_grad(false)).copy_(tensor);
      copies_.emplace_back(tensor, dense);
    }
    kernels::TensorRow row;
    row.grad = dense.unsafeGetTensorImpl()->mutable_data();
    row.numel = dense.numel();
    BucketKey key;
    key.device = device_;
    key.grad = dtype_of(argument, dense);
    buckets_.of(key).add(row);
  }
}

void TensorList::copy_back() {
  for (auto& [tensor, copy] : copies_) tensor.copy_(copy);
}

}  // namespace torchfuse::ops
