// SPDX-License-Identifier: BSD-3-Clause
#include "meta_results.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DefaultDtype.h>

#include <mutex>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "ops.h"

namespace pretended_cuda {
namespace {

constexpr std::size_t kLongestDescription = 1 << 14;
constexpr std::size_t kMostRemembered = 1 << 23;  // bytes of descriptions

/// The CUDA tensors of a call, each once.
class Distinct {
 public:
  explicit Distinct(const torch::jit::Stack& arguments) {
    for (const c10::IValue& value : arguments) {
      for_each_tensor(value, [this](const at::Tensor& tensor) {
        if (on_device(tensor) && places_.try_emplace(key(tensor), tensors_.size()).second) {
          tensors_.push_back(tensor);
          storages_.try_emplace(tensor.storage().unsafeGetStorageImpl(), storages_.size());
        }
      });
    }
  }
  [[nodiscard]] std::size_t place_of(const at::Tensor& tensor) const {
    return places_.at(key(tensor));
  }
  [[nodiscard]] const std::vector<at::Tensor>& tensors() const { return tensors_; }
  /// The number of the tensor's storage among theirs.
  [[nodiscard]] std::size_t storage_of(const at::Tensor& tensor) const {
    return storages_.at(tensor.storage().unsafeGetStorageImpl());
  }

 private:
  static const c10::TensorImpl* key(const at::Tensor& tensor) {
    return tensor.unsafeGetTensorImpl();
  }
  std::vector<at::Tensor> tensors_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> places_;
  std::unordered_map<const c10::StorageImpl*, std::size_t> storages_;
};

/// All that a meta kernel sees of a call, as bytes.
class Description {
 public:
  Description(const c10::OperatorHandle& op, const torch::jit::Stack& arguments,
              const Distinct& tensors)
      : tensors_(tensors) {
    const auto& formal = op.schema().arguments();
    const bool in_place = !formal.empty() && is_written(formal[0]);
    // A random op's numbers are checked by its meta kernel.
    factors_matter_ = op.hasTag(at::Tag::nondeterministic_seeded) ||
                      (!in_place && !op.hasTag(at::Tag::pointwise) &&
                       op.schema().name().rfind("aten::_foreach_", 0) != 0);
    put(&op.schema());
    put(c10::get_default_dtype_as_scalartype());
    for (const at::Tensor& tensor : tensors.tensors()) put_metadata(tensor);
    for (const c10::IValue& value : arguments) put_value(value);
  }
  /// Nothing where the kernel could read the host's data, and for very long lists.
  [[nodiscard]] std::optional<std::string> text() && {
    if (!complete_ || text_.size() > kLongestDescription) return std::nullopt;
    return std::move(text_);
  }

 private:
  template <typename Value>
  void put(const Value& value) {
    text_.append(std::string_view(reinterpret_cast<const char*>(&value), sizeof(value)));
  }
  void put_metadata(const at::Tensor& tensor) {
    put(tensors_.storage_of(tensor));
    put(tensor.storage_offset());
    put(tensor.dim());
    for (const std::int64_t size : tensor.sizes()) put(size);
    for (const std::int64_t stride : tensor.strides()) put(stride);
    put(tensor.scalar_type());
    put(tensor.is_conj());
    put(tensor.is_neg());
    put(tensor.unsafeGetTensorImpl()->is_wrapped_number());
  }
  void put_value(const c10::IValue& value) {
    if (value.isTensor()) {
      put_tensor(value.toTensor());
    } else if (value.isList()) {
      put(value.toListRef().size());
      for (const c10::IValue& element : value.toListRef()) put_value(element);
    } else if (value.isDouble()) {
      put('d');
      if (factors_matter_) put(value.toDouble());
    } else if (value.isInt()) {
      put('i');
      put(value.toInt());
    } else if (value.isBool()) {
      put(value.toBool() ? 't' : 'f');
    } else if (value.isNone() || value.isDevice() || value.isGenerator()) {
      put('-');  // all are of the one device
    } else if (value.isString()) {
      put(value.toStringRef().size());
      text_ += value.toStringRef();
    } else {
      complete_ = false;
    }
  }
  void put_tensor(const at::Tensor& tensor) {
    put(on_device(tensor) ? 'T' : tensor.defined() ? 'h' : '-');
    if (on_device(tensor)) {
      put(tensors_.place_of(tensor));
    } else if (tensor.defined()) {
      put(tensor.scalar_type());
      put(tensor.unsafeGetTensorImpl()->is_wrapped_number());
      complete_ = complete_ && tensor.dim() == 0 && !factors_matter_;
    }
  }

  const Distinct& tensors_;
  std::string text_;
  bool complete_ = true;
  bool factors_matter_ = true;  ///< sizes may follow from a floating-point number, as arange's do
};

/// Tensors on meta like these; where these share a storage, so do they.
std::vector<at::Tensor> like_on_meta(const Distinct& tensors) {
  std::unordered_map<std::size_t, c10::Storage> storages;
  std::vector<at::Tensor> metas;
  for (const at::Tensor& tensor : tensors.tensors()) {
    const at::TensorOptions options = tensor.options().device(c10::kMeta);
    c10::Storage& storage = storages[tensors.storage_of(tensor)];
    if (!storage) {
      const auto bytes = static_cast<std::int64_t>(tensor.storage().nbytes());
      storage = at::empty({bytes}, options.dtype(at::kByte)).storage();
    }
    at::Tensor meta = at::empty_strided(tensor.sizes(), tensor.strides(), options);
    c10::TensorImpl* const impl = meta.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(storage);
    impl->set_storage_offset(tensor.storage_offset());
    copy_bits(tensor, meta);
    metas.push_back(std::move(meta));
  }
  return metas;
}

MetaResults run_on_meta(const c10::OperatorHandle& op, const torch::jit::Stack& arguments,
                        const Distinct& tensors, std::optional<std::size_t> generator_at) {
  MetaResults made{like_on_meta(tensors), std::nullopt};
  torch::jit::Stack stack;
  for (const c10::IValue& value : arguments) {
    if (value.isDevice() && value.toDevice().is_cuda()) {
      stack.emplace_back(c10::Device(c10::kMeta));
      continue;
    }
    stack.push_back(map_tensors(value, [&](const at::Tensor& tensor) {
      return on_device(tensor) ? made.arguments[tensors.place_of(tensor)] : tensor;
    }));
  }
  if (generator_at) stack[*generator_at] = c10::IValue();
  try {
    const at::AutoDispatchBelowADInplaceOrView below;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
  } catch (const c10::NotImplementedError&) {
    return made;
  }
  for (const c10::IValue& value : stack) {
    if (!value.isTensor() && !value.isTensorList()) return made;
  }
  made.results = std::move(stack);
  return made;
}

}  // namespace

Pairs MetaResults::shown(const torch::jit::Stack& call) const {
  const Distinct tensors(call);
  Pairs pairs;
  for (std::size_t i = 0; i < arguments.size(); ++i) pairs.add(arguments[i], tensors.tensors()[i]);
  return pairs;
}

std::shared_ptr<const MetaResults> results_on_meta(const c10::OperatorHandle& op,
                                                   const torch::jit::Stack& arguments,
                                                   std::optional<std::size_t> generator_at) {
  static std::mutex mutex;
  static std::size_t bytes = 0;
  // Never destroyed: threads may still call ops while the process ends.
  static auto& remembered =
      *new std::unordered_map<std::string, std::shared_ptr<const MetaResults>>;
  const Distinct tensors(arguments);
  const std::optional<std::string> key = Description(op, arguments, tensors).text();
  if (key) {
    const std::lock_guard lock(mutex);
    if (const auto found = remembered.find(*key); found != remembered.end()) return found->second;
  }
  auto made =
      std::make_shared<const MetaResults>(run_on_meta(op, arguments, tensors, generator_at));
  if (key) {
    const std::lock_guard lock(mutex);
    if (bytes > kMostRemembered) {
      remembered.clear();
      bytes = 0;
    }
    bytes += key->size();
    remembered.emplace(*key, made);
  }
  return made;
}

}  // namespace pretended_cuda
