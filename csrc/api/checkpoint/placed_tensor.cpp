// SPDX-License-Identifier: BSD-3-Clause
#include "api/checkpoint/placed_tensor.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>

#include <algorithm>

#include "api/checkpoint/storage_classes.h"

namespace torchfuse::checkpoint {

namespace {

constexpr const char* kOtherValue = ", got another value: the index is damaged.";

std::vector<std::int64_t> ints_of(const c10::IValue& value, const std::string& where) {
  std::vector<std::int64_t> numbers;
  TORCH_CHECK_VALUE(value.isTuple(), where, " as a tuple of ints", kOtherValue);
  for (const c10::IValue& number : value.toTupleRef().elements()) {
    TORCH_CHECK_VALUE(number.isInt() && number.toInt() >= 0, where, " as a tuple of ints",
                      kOtherValue);
    numbers.push_back(number.toInt());
  }
  return numbers;
}

c10::IValue tuple_of(const std::vector<std::int64_t>& numbers) {
  return c10::ivalue::Tuple::create(std::vector<c10::IValue>(numbers.begin(), numbers.end()));
}

at::ScalarType dtype_of(const c10::IValue& value, const std::string& where) {
  const auto known =
      std::find_if(kStorageClasses.begin(), kStorageClasses.end(), [&](const StorageClass& each) {
        return value.isString() && value.toStringRef() == each.name;
      });
  TORCH_CHECK_VALUE(known != kStorageClasses.end(), where, " as the name of one", kOtherValue);
  return known->dtype;
}

const char* name_of(at::ScalarType dtype) {
  const auto known = std::find_if(kStorageClasses.begin(), kStorageClasses.end(),
                                  [&](const StorageClass& each) { return each.dtype == dtype; });
  TORCH_INTERNAL_ASSERT(known != kStorageClasses.end());
  return known->name.data();
}

}  // namespace

Dict PlacedTensor::to_dict() const {
  List places = make_list();
  for (const Span& span : spans) {
    places.push_back(tuple_of({static_cast<std::int64_t>(span.file), span.begin, span.end}));
  }
  Dict dict = make_dict();
  dict.insert_or_assign("dtype", name_of(dtype));
  dict.insert_or_assign("sizes", tuple_of(sizes));
  dict.insert_or_assign("strides", tuple_of(strides));
  dict.insert_or_assign("spans", places);
  return dict;
}

PlacedTensor PlacedTensor::of(const Dict& saved, std::size_t files, const std::string& where) {
  const std::string holds = where + " to hold ";
  PlacedTensor placed{dtype_of(entry(saved, "dtype", where), holds + "'dtype'"),
                      ints_of(entry(saved, "sizes", where), holds + "'sizes'"),
                      ints_of(entry(saved, "strides", where), holds + "'strides'"),
                      {}};
  const bool dense = placed.sizes.size() == placed.strides.size() &&
                     at::empty_strided(placed.sizes, placed.strides, at::TensorOptions(at::kMeta))
                         .is_non_overlapping_and_dense();
  TORCH_CHECK_VALUE(dense, holds, "strides without gaps", kOtherValue);
  const c10::IValue spans = entry(saved, "spans", where);
  TORCH_CHECK_VALUE(spans.isList(), holds, "'spans' as a list", kOtherValue);
  std::int64_t end = 0;
  for (const c10::IValue& each : spans.toList()) {
    const auto numbers = ints_of(each, holds + "each of its 'spans'");
    const bool follows = numbers.size() == 3 && numbers[1] == end && numbers[2] > end &&
                         static_cast<std::size_t>(numbers[0]) < files;
    TORCH_CHECK_VALUE(follows, holds, "'spans' one behind the other", kOtherValue);
    end = numbers[2];
    placed.spans.push_back({static_cast<std::size_t>(numbers[0]), numbers[1], numbers[2]});
  }
  TORCH_CHECK_VALUE(end == placed.numel(), holds, "'spans' of all ", placed.numel(), " elements",
                    kOtherValue);
  return placed;
}

std::int64_t PlacedTensor::numel() const { return c10::multiply_integers(sizes); }

bool PlacedTensor::is_laid_out_like(const at::Tensor& tensor) const {
  return tensor.strides() == strides || tensor.numel() <= 1;
}

}  // namespace torchfuse::checkpoint
