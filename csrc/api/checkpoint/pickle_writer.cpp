// SPDX-License-Identifier: BSD-3-Clause
#include "api/checkpoint/pickle_writer.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <bit>
#include <cstdint>
#include <limits>
#include <unordered_map>
#include <utility>

#include "api/checkpoint/storage_classes.h"
#include "api/checkpoint/values.h"

namespace torchfuse::checkpoint {

namespace {

static_assert(std::endian::native == std::endian::little);

const StorageClass& storage_class_of(const at::Tensor& tensor, const std::string& where) {
  for (const StorageClass& known : kStorageClasses) {
    if (known.dtype == tensor.scalar_type() && !known.storage.empty()) return known;
  }
  TORCH_CHECK_VALUE(false, where, " to have a dtype that checkpoints hold, got ",
                    tensor.scalar_type(), ". Convert it, or store its bytes as uint8.");
}

/// Returns the bytes without gaps, with unchanged strides if the tensor is dense.
at::Tensor dense(const at::Tensor& tensor) {
  const at::Tensor plain = tensor.detach().resolve_conj().resolve_neg();
  return plain.is_non_overlapping_and_dense() ? plain : plain.contiguous();
}

bool is_same_view(const at::Tensor& lhs, const at::Tensor& rhs) {
  return lhs.scalar_type() == rhs.scalar_type() && lhs.device() == rhs.device() &&
         lhs.sizes() == rhs.sizes() && lhs.strides() == rhs.strides();
}

/// Nesting depth of a pickled tensor: a tuple of arguments, which contains the tuple of sizes.
constexpr int kTensorLevels = 2;

// Opcodes of pickle protocol 2, named as in Python's pickletools.
class Writer {
 public:
  Pickle run(const c10::IValue& value, const std::string& where) {
    pickle_.bytes = "\x80\x02";  // PROTO 2
    write(value, where, 0);
    pickle_.bytes += '.';  // STOP
    return std::move(pickle_);
  }

 private:
  template <class Number>
  void append(Number number) {
    pickle_.bytes.append(reinterpret_cast<const char*>(&number), sizeof number);
  }

  void write_int(std::int64_t number) {
    if (number >= std::numeric_limits<std::int32_t>::min() &&
        number <= std::numeric_limits<std::int32_t>::max()) {
      pickle_.bytes += 'J';  // BININT
      append(static_cast<std::int32_t>(number));
    } else {
      pickle_.bytes += "\x8a\x08";  // LONG1 of 8 bytes
      append(number);
    }
  }

  void write_double(double number) {
    pickle_.bytes += 'G';  // BINFLOAT, which alone is big-endian
    append(__builtin_bswap64(std::bit_cast<std::uint64_t>(number)));
  }

  void write_string(const std::string& text) {
    pickle_.bytes += 'X';  // BINUNICODE
    append(static_cast<std::uint32_t>(text.size()));
    pickle_.bytes += text;
  }

  void write_ints(at::IntArrayRef numbers) {
    pickle_.bytes += '(';  // MARK
    for (const std::int64_t number : numbers) write_int(number);
    pickle_.bytes += 't';  // TUPLE
  }

  /// Returns the tensor's index in Pickle::tensors. Adds the tensor unless the same view is
  /// present.
  std::size_t key_of(const at::Tensor& tensor) {
    const auto [first, last] = keys_.equal_range(tensor.data_ptr());
    for (auto known = first; known != last; ++known) {
      if (is_same_view(tensor, pickle_.tensors[known->second])) return known->second;
    }
    pickle_.tensors.push_back(tensor);
    const std::size_t key = pickle_.tensors.size() - 1;
    keys_.emplace(tensor.data_ptr(), key);
    return key;
  }

  void write_tensor(const at::Tensor& tensor, const std::string& where) {
    TORCH_CHECK_VALUE(tensor.defined(), where, " to be a tensor, got an undefined one.");
    TORCH_CHECK_VALUE(tensor.layout() == at::kStrided && !tensor.is_quantized(), where,
                      " to be a dense tensor, got layout ", tensor.layout(), ".");
    const at::Tensor plain = dense(tensor);
    const StorageClass& storage_class = storage_class_of(plain, where);
    const std::size_t key = key_of(plain);
    pickle_.bytes += "ctorch._utils\n_rebuild_tensor_v2\n((";  // GLOBAL, MARK, MARK
    write_string("storage");
    pickle_.bytes += "ctorch\n";  // GLOBAL
    pickle_.bytes += storage_class.storage;
    pickle_.bytes += '\n';
    write_string(std::to_string(key));
    write_string("cpu");
    write_int(plain.numel());
    pickle_.bytes += "tQ";  // TUPLE, BINPERSID
    write_int(0);
    write_ints(plain.sizes());
    write_ints(plain.strides());
    pickle_.bytes += "\x89";                            // NEWFALSE: requires_grad
    pickle_.bytes += "ccollections\nOrderedDict\n)Rt";  // no backward hooks
    pickle_.bytes += 'R';                               // REDUCE
  }

  void write_dict(const Dict& dict, const std::string& where, int depth) {
    pickle_.bytes += '}';  // EMPTY_DICT
    for (const auto& entry : dict) {
      TORCH_CHECK_VALUE(entry.key().isString() || entry.key().isInt(), where,
                        " to have strings or ints as keys, got a ", type_name(entry.key()), ".");
      write(entry.key(), where, depth);
      write(entry.value(), where + "[" + key_name(entry.key()) + "]", depth);
      pickle_.bytes += 's';  // SETITEM
    }
  }

  void write(const c10::IValue& value, const std::string& where, int depth) {
    const int levels = value.isTensor() ? kTensorLevels : 0;
    TORCH_CHECK_VALUE(depth + levels < kMostNested, where, " to be nested at most ", kMostNested,
                      " deep, got more.");
    const auto element = [&](std::size_t index, const c10::IValue& item) {
      write(item, where + "[" + std::to_string(index) + "]", depth + 1);
    };
    if (value.isNone()) {
      pickle_.bytes += 'N';
    } else if (value.isBool()) {
      pickle_.bytes += value.toBool() ? '\x88' : '\x89';
    } else if (value.isInt()) {
      write_int(value.toInt());
    } else if (value.isDouble()) {
      write_double(value.toDouble());
    } else if (value.isString()) {
      TORCH_CHECK_VALUE(is_utf8(value.toStringRef(), /*surrogates=*/true), where,
                        " to hold text in UTF-8, got other bytes. Store them in a uint8 tensor.");
      write_string(value.toStringRef());
    } else if (value.isTensor()) {
      write_tensor(value.toTensor(), where);
    } else if (value.isGenericDict()) {
      write_dict(value.toGenericDict(), where, depth + 1);
    } else if (value.isTuple()) {
      pickle_.bytes += '(';  // MARK
      std::size_t index = 0;
      for (const c10::IValue& item : value.toTupleRef().elements()) element(index++, item);
      pickle_.bytes += 't';  // TUPLE
    } else if (value.isList()) {
      pickle_.bytes += ']';  // EMPTY_LIST
      std::size_t index = 0;
      for (const c10::IValue& item : value.toList()) {
        element(index++, item);
        pickle_.bytes += 'a';  // APPEND
      }
    } else {
      TORCH_CHECK_VALUE(false, where,
                        " to be None, a bool, int, float, string or tensor, or a tuple, list or "
                        "dict of them, got ",
                        value.tagKind(), ".");
    }
  }

  Pickle pickle_;
  std::unordered_multimap<const void*, std::size_t> keys_;
};

}  // namespace

Pickle to_pickle(const c10::IValue& value, const std::string& where) {
  return Writer().run(value, where);
}

}  // namespace torchfuse::checkpoint
