// SPDX-License-Identifier: BSD-3-Clause
#include "host_view.h"

#include <ATen/ATen.h>

namespace pretended_cuda {

void copy_bits(const at::Tensor& from, const at::Tensor& to) {
  c10::TensorImpl* const impl = to.unsafeGetTensorImpl();
  if (from.is_conj()) impl->_set_conj(true);
  if (from.is_neg()) impl->_set_neg(true);
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
}

at::Tensor HostViews::of(const at::Tensor& cuda) {
  const c10::Storage& memory = cuda.storage();
  c10::Storage& storage = storages_[memory.unsafeGetStorageImpl()];
  if (!storage) {
    storage = c10::Storage(c10::Storage::use_byte_size_t{}, memory.nbytes(),
                           at::DataPtr(const_cast<void*>(memory.data()), c10::Device(c10::kCPU)),
                           /*allocator=*/nullptr, /*resizable=*/false);
  }
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), cuda.dtype());
  c10::TensorImpl* const impl = view.unsafeGetTensorImpl();
  impl->set_storage_offset(cuda.storage_offset());
  impl->set_sizes_and_strides(cuda.sizes(), cuda.strides());
  copy_bits(cuda, view);
  return view;
}

c10::IValue map_tensors(const c10::IValue& value, const TensorMap& map) {
  if (value.isTensor()) return map(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(map(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor ? std::optional(map(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

void for_each_tensor(const c10::IValue& value,
                     const std::function<void(const at::Tensor&)>& visit) {
  map_tensors(value, [&](const at::Tensor& tensor) {
    visit(tensor);
    return tensor;
  });
}

const at::Tensor* Pairs::find(const at::Tensor& tensor) const {
  for (const auto& [from, to] : pairs_) {
    if (from.is_same(tensor)) return &to;
  }
  return nullptr;
}

at::Tensor Pairs::find_storage(const at::Tensor& tensor) const {
  if (!tensor.defined() || !tensor.has_storage()) return {};
  for (const auto& [from, to] : pairs_) {
    if (from.has_storage() && tensor.storage().is_alias_of(from.storage())) {
      return to.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    }
  }
  return {};
}

}  // namespace pretended_cuda
