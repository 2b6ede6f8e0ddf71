// SPDX-License-Identifier: BSD-3-Clause
// Reads archives, with errors that name a missing or invalid field. `Archive` is torch's
// InputArchive or StateArchive.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <torch/serialize/archive.h>
#include <torchfuse/write_back_grads.h>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

namespace torchfuse::optim {

/// Returns the archive's value `key`. Throws, naming `owner`, if the value is missing, or if
/// `valid` returns false; `type` describes valid values.
template <class Archive, typename Valid>
c10::IValue read_value(Archive& archive, const std::string& owner, const std::string& key,
                       const char* type, Valid valid) {
  c10::IValue value;
  TORCH_CHECK_VALUE(archive.try_read(key, value), owner, ": expected the archive to hold ", key,
                    ", got none. Load an archive that torch::save wrote for this class.");
  TORCH_CHECK_VALUE(std::invoke(valid, value), owner, ": expected the archive's ", key, " to be ",
                    type, ", got a value of type ", value.tagKind(), ".");
  return value;
}

template <class Archive>
void read_into(Archive& archive, const std::string& owner, const std::string& key, double& number) {
  number =
      read_value(archive, owner, key, "a floating-point number", &c10::IValue::isDouble).toDouble();
}

template <class Archive>
void read_into(Archive& archive, const std::string& owner, const std::string& key,
               std::int64_t& number) {
  number = read_value(archive, owner, key, "an integer", &c10::IValue::isInt).toInt();
}

template <class Archive>
void read_into(Archive& archive, const std::string& owner, const std::string& key, bool& flag) {
  flag = read_value(archive, owner, key, "a bool", &c10::IValue::isBool).toBool();
}

template <class Archive>
void read_into(Archive& archive, const std::string& owner, const std::string& key,
               std::optional<double>& number) {
  const c10::IValue value =
      read_value(archive, owner, key, "a number or none",
                 [](const c10::IValue& found) { return found.isNone() || found.isDouble(); });
  number = value.isNone() ? std::nullopt : std::optional<double>(value.toDouble());
}

template <class Archive, std::same_as<double>... Numbers>
void read_into(Archive& archive, const std::string& owner, const std::string& key,
               std::tuple<Numbers...>& numbers) {
  constexpr std::size_t kCount = sizeof...(Numbers);
  const auto fits = [](const c10::IValue& value) {
    if (!value.isTuple()) return false;
    const auto& elements = value.toTupleRef().elements();
    return elements.size() == kCount &&
           std::all_of(elements.begin(), elements.end(),
                       [](const auto& each) { return each.isDouble(); });
  };
  const char* type = kCount == 2 ? "a pair of numbers" : "three numbers";
  const c10::IValue value = read_value(archive, owner, key, type, fits);
  const auto& elements = value.toTupleRef().elements();
  [&]<std::size_t... i>(std::index_sequence<i...>) {
    numbers = {elements[i].toDouble()...};
  }(std::make_index_sequence<kCount>());
}

template <class Archive>
void read_into(Archive& archive, const std::string& owner, const std::string& key,
               std::optional<std::string>& text) {
  const c10::IValue value =
      read_value(archive, owner, key, "a string or none",
                 [](const c10::IValue& found) { return found.isNone() || found.isString(); });
  text = value.isNone() ? std::nullopt : std::optional<std::string>(value.toStringRef());
}

/// Returns whether the archive contains `key`. Older archives lack newer options.
template <class Archive>
bool holds(Archive& archive, const std::string& key) {
  c10::IValue value;
  return archive.try_read(key, value);
}

template <class Archive>
std::int64_t read_int(Archive& archive, const std::string& owner, const std::string& key) {
  std::int64_t number = 0;
  read_into(archive, owner, key, number);
  return number;
}

/// Returns a state dtype's name in archives.
inline const char* name_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return "float64";
    case at::kHalf:
      return "float16";
    case at::kBFloat16:
      return "bfloat16";
    default:
      return "float32";
  }
}

template <class Archive>
void read_into(Archive& archive, const std::string& owner, const std::string& key,
               std::optional<at::ScalarType>& dtype) {
  const c10::IValue value =
      read_value(archive, owner, key, "the name of a dtype or none",
                 [](const c10::IValue& value) { return value.isNone() || value.isString(); });
  dtype = std::nullopt;
  if (value.isNone()) return;
  const std::string& name = value.toStringRef();
  for (const auto known : {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble}) {
    if (name == name_of(known)) dtype = known;
  }
  TORCH_CHECK_VALUE(dtype.has_value(), owner, ": expected the archive's ", key,
                    " to be float32, float16, bfloat16 or float64, got ", name, ".");
}

/// kNothing and kClipped are stored as bools, as in archives from before kUnscaled existed.
template <class Archive>
void read_into(Archive& archive, const std::string& owner, const std::string& key,
               WriteBackGrads& choice) {
  const c10::IValue value =
      read_value(archive, owner, key, "a bool or \"unscaled\"", [](const c10::IValue& value) {
        return value.isBool() || (value.isString() && value.toStringRef() == "unscaled");
      });
  choice = value.isBool() ? WriteBackGrads(value.toBool()) : WriteBackGrads::kUnscaled;
}

/// Returns an option's value for an archive.
template <typename Value>
c10::IValue to_archive(const Value& value) {
  return c10::IValue(value);
}
inline c10::IValue to_archive(const std::optional<at::ScalarType>& dtype) {
  return dtype ? c10::IValue(name_of(*dtype)) : c10::IValue();
}

inline c10::IValue to_archive(const WriteBackGrads& choice) {
  if (choice == WriteBackGrads::kUnscaled) return c10::IValue("unscaled");
  return c10::IValue(choice == WriteBackGrads::kClipped);
}

template <class Archive>
std::string read_string(Archive& archive, const std::string& owner, const std::string& key) {
  return read_value(archive, owner, key, "a string", &c10::IValue::isString).toStringRef();
}

/// Opens the archive nested under `key`.
inline void read_nested(torch::serialize::InputArchive& archive, const std::string& owner,
                        const std::string& key, torch::serialize::InputArchive& nested) {
  read_value(archive, owner, key, "a nested archive", &c10::IValue::isModule);
  archive.read(key, nested);
}

}  // namespace torchfuse::optim
