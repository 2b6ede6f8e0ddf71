// SPDX-License-Identifier: BSD-3-Clause
#include "api/checkpoint/pickle_objects.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <vector>

#include "api/checkpoint/storage_classes.h"
#include "api/checkpoint/values.h"

namespace torchfuse::checkpoint {

namespace {

constexpr const char* kRebuildTensor = "torch._utils._rebuild_tensor_v2";
/// Rebuilds tensors whose dtype has no typed storage class.
constexpr const char* kRebuildFromBytes = "torch._utils._rebuild_tensor_v3";
constexpr const char* kBytes = "torch.storage.UntypedStorage";
constexpr const char* kOrderedDict = "collections.OrderedDict";
/// Callables that return the first argument, for plain values.
constexpr const char* kWrappers[] = {"torch._utils._rebuild_parameter", "torch.Size",
                                     "collections.Counter"};

/// Returns the entry whose storage class or, with `of_dtype`, whose dtype has this name, or null.
const StorageClass* known_as(const std::string& name, bool of_dtype) {
  for (const StorageClass& known : kStorageClasses) {
    const std::string_view own = of_dtype ? known.name : known.storage;
    if (!own.empty() && name == "torch." + std::string(own)) return &known;
  }
  return nullptr;
}

std::vector<c10::IValue> elements_of(const PickleInput& input, const c10::IValue& tuple,
                                     std::size_t least) {
  input.check(tuple.isTuple() && tuple.toTupleRef().elements().size() >= least,
              "tuples for its calls");
  return tuple.toTupleRef().elements().vec();
}

std::vector<std::int64_t> ints_of(const PickleInput& input, const c10::IValue& tuple) {
  std::vector<std::int64_t> numbers;
  for (const c10::IValue& number : elements_of(input, tuple, 0)) {
    input.check(number.isInt() && number.toInt() >= 0, "sizes of its tensors");
    numbers.push_back(number.toInt());
  }
  return numbers;
}

/// Views a storage of bytes as elements. `dtype` is the seventh argument of kRebuildFromBytes.
at::Tensor elements_of_bytes(const PickleInput& input, const at::Tensor& bytes,
                             const c10::IValue& dtype) {
  input.check(dtype.isString(), "dtypes of its tensors");
  const StorageClass* const known = known_as(dtype.toStringRef(), /*of_dtype=*/true);
  input.check(known != nullptr && bytes.scalar_type() == at::kByte &&
                  bytes.numel() % static_cast<std::int64_t>(c10::elementSize(known->dtype)) == 0,
              "dtypes of its tensors");
  return bytes.view(known->dtype);
}

/// Builds a tensor from the arguments (storage, offset, sizes, strides, requires_grad, hooks).
at::Tensor tensor_of(const PickleInput& input, const c10::IValue& arguments, bool from_bytes) {
  const auto parts = elements_of(input, arguments, from_bytes ? 7 : 4);
  input.check(parts[0].isTensor() && parts[1].isInt() && parts[1].toInt() >= 0,
              "storages of tensors");
  const std::vector<std::int64_t> sizes = ints_of(input, parts[2]);
  const std::vector<std::int64_t> strides = ints_of(input, parts[3]);
  at::Tensor storage = parts[0].toTensor();
  if (from_bytes) storage = elements_of_bytes(input, storage, parts[6]);
  const std::int64_t offset = parts[1].toInt();
  // Views without elements may begin beyond the storage's end.
  const bool empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
  bool fits = sizes.size() == strides.size();
  std::int64_t last = offset;
  for (std::size_t i = 0; fits && i < sizes.size(); ++i) {
    std::int64_t extent = 0;
    fits = sizes[i] == 0 || (!__builtin_mul_overflow(sizes[i] - 1, strides[i], &extent) &&
                             !__builtin_add_overflow(last, extent, &last));
  }
  input.check(fits && (empty || last < storage.numel()), "tensors within their storages");
  return storage.as_strided(sizes, strides, empty ? 0 : offset);
}

}  // namespace

bool is_dtype(const std::string& name) {
  return known_as(name, /*of_dtype=*/true) != nullptr ||
         std::any_of(kNamesAlone.begin(), kNamesAlone.end(),
                     [&](std::string_view known) { return name == "torch." + std::string(known); });
}

void check_global(const PickleInput& input, const std::string& name) {
  const bool known =
      name == kOrderedDict || name == kRebuildTensor || name == kRebuildFromBytes ||
      name == kBytes ||
      std::find(std::begin(kWrappers), std::end(kWrappers), name) != std::end(kWrappers) ||
      known_as(name, /*of_dtype=*/false) != nullptr;
  TORCH_CHECK_VALUE(
      known, input.where(), " to hold plain values and dense tensors only, got ", name,
      ". No code from the file was run. Save the state_dict() of objects, not the objects.");
}

c10::IValue call(const PickleInput& input, const std::string& name, const c10::IValue& arguments) {
  if (name == kRebuildTensor) return tensor_of(input, arguments, /*from_bytes=*/false);
  if (name == kRebuildFromBytes) return tensor_of(input, arguments, /*from_bytes=*/true);
  if (name != kOrderedDict) return elements_of(input, arguments, 1)[0];
  input.check(arguments.isTuple() && arguments.toTupleRef().elements().empty(),
              "ordered dicts that begin empty");
  return make_dict();
}

/// Reads the storage for an id: ('storage', class, key, location, number of elements).
at::Tensor storage_of(const PickleInput& input, const c10::IValue& id,
                      const ReadStorage& read_storage) {
  const auto parts = elements_of(input, id, 5);
  input.check(parts[1].isString() && parts[2].isString() && parts[4].isInt(), "ids of storages");
  const std::string& name = parts[1].toStringRef();
  if (name == kBytes) return read_storage(parts[2].toStringRef(), at::kByte, parts[4].toInt());
  const StorageClass* const found = known_as(name, /*of_dtype=*/false);
  input.check(found != nullptr, "ids of storages");
  return read_storage(parts[2].toStringRef(), found->dtype, parts[4].toInt());
}

}  // namespace torchfuse::checkpoint
