// SPDX-License-Identifier: BSD-3-Clause
// What the kernel tests share: levels of this machine, tensors at any alignment, tables.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/common/float16.h"
#include "kernels/common/tensor_table.h"
#include "kernels/cpu/isa.h"

namespace torchfuse::kernels::testing {

inline std::vector<CpuIsa> levels_here() {
  std::vector<CpuIsa> levels;
  for (const CpuIsa isa : kCpuLevels) {
    if (isa <= detect_cpu_isa()) levels.push_back(isa);
  }
  return levels;
}

inline constexpr DType kEveryDType[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                                        DType::kFloat64};

/// Elements of storage type `dtype`, exactly as long as needed, so that a sanitizer sees every
/// access past either end; `offset` elements from an allocation's start.
class Buffer {
 public:
  Buffer(DType dtype, std::int64_t numel, std::int64_t offset = 0)
      : dtype_(dtype), numel_(numel), offset_(offset), bytes_((numel + offset) * size_of(dtype)) {}

  void* data() { return bytes_.data() + offset_ * size_of(dtype_); }
  const void* data() const { return bytes_.data() + offset_ * size_of(dtype_); }
  std::int64_t numel() const { return numel_; }
  DType dtype() const { return dtype_; }

  double get(std::int64_t i) const {
    const char* at = static_cast<const char*>(data()) + i * size_of(dtype_);
    if (dtype_ == DType::kFloat64) return read<double>(at);
    if (dtype_ == DType::kFloat32) return read<float>(at);
    if (dtype_ == DType::kFloat16) return to_float(read<Half>(at));
    return to_float(read<BFloat16>(at));
  }

  void set(std::int64_t i, double value) {
    char* at = static_cast<char*>(data()) + i * size_of(dtype_);
    const float narrow = static_cast<float>(value);
    if (dtype_ == DType::kFloat64) write(at, value);
    if (dtype_ == DType::kFloat32) write(at, narrow);
    if (dtype_ == DType::kFloat16) write(at, to_half(narrow));
    if (dtype_ == DType::kBFloat16) write(at, to_bfloat16(narrow));
  }

  void fill_normal(std::mt19937& random, double scale = 1.0) {
    std::normal_distribution<double> normal(0.0, scale);
    for (std::int64_t i = 0; i < numel_; ++i) set(i, normal(random));
  }

  void fill_abs_normal(std::mt19937& random, double scale = 1.0) {
    fill_normal(random, scale);
    for (std::int64_t i = 0; i < numel_; ++i) set(i, std::abs(get(i)));
  }

  bool operator==(const Buffer& other) const { return bytes_ == other.bytes_; }

  /// The same elements, `offset` from the start of another allocation.
  Buffer at_offset(std::int64_t offset) const {
    Buffer copy(dtype_, numel_, offset);
    const auto* bytes = static_cast<const char*>(data());
    std::copy_n(bytes, static_cast<std::size_t>(numel_) * size_of(dtype_),
                static_cast<char*>(copy.data()));
    return copy;
  }

 private:
  template <class T>
  static T read(const char* at) {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
  }
  template <class T>
  static void write(char* at, T value) {
    std::memcpy(at, &value, sizeof value);
  }

  DType dtype_;
  std::int64_t numel_;
  std::int64_t offset_;
  std::vector<char> bytes_;
};

/// Rows with their prefix sums.
struct Rows {
  std::vector<TensorRow> rows;
  std::vector<std::int64_t> offsets{0};

  void add(const TensorRow& row) {
    rows.push_back(row);
    offsets.push_back(offsets.back() + row.numel);
  }

  TensorTable table(DType param, DType grad, DType state, bool has_master = false) const {
    TensorTable table;
    table.rows = rows.data();
    table.offsets = offsets.data();
    table.count = static_cast<std::int64_t>(rows.size());
    table.param = param;
    table.grad = grad;
    for (DType& dtype : table.state) dtype = state;
    table.has_master = has_master;
    return table;
  }
};

/// Normally distributed gradients, `offset` elements from the starts of their allocations.
struct Gradients {
  Gradients(DType dtype_, const std::vector<std::int64_t>& sizes, std::int64_t offset = 0)
      : dtype(dtype_) {
    std::mt19937 random(3);
    for (const std::int64_t numel : sizes) {
      tensors.emplace_back(dtype, numel, offset).fill_normal(random, 100.0);
      rows.add({.grad = tensors.back().data(), .numel = numel});
    }
  }

  TensorTable table() const { return rows.table(dtype, dtype, dtype); }
  /// Calls body(begin, end) for all elements in ranges of at most `piece`.
  template <class Body>
  void in_pieces(std::int64_t piece, const Body& body) const {
    const std::int64_t total = rows.offsets.back();
    for (std::int64_t begin = 0; begin < total; begin += piece) {
      body(begin, std::min(total, begin + piece));
    }
  }

  DType dtype;
  std::vector<Buffer> tensors;
  Rows rows;
};

/// Calls visit(isa, gradients) with an infinity or NaN in the first, middle or last place of a
/// tensor between two others, at every level.
template <class Visit>
void for_each_nonfinite_place(const std::vector<std::int64_t>& sizes, const Visit& visit) {
  for (const DType dtype : kEveryDType) {
    for (const CpuIsa isa : levels_here()) {
      for (const std::int64_t numel : sizes) {
        for (const double value : {double(INFINITY), -double(INFINITY), double(NAN)}) {
          for (const std::int64_t at : {std::int64_t{0}, numel / 2, numel - 1}) {
            Gradients gradients(dtype, {3, numel, 5});
            gradients.tensors[1].set(at, value);
            SCOPED_TRACE(::testing::Message() << name_of(isa) << ' ' << numel << ' ' << at);
            visit(isa, gradients);
          }
        }
      }
    }
  }
}

/// Sizes around every vector width, lane count and chunk border.
inline std::vector<std::int64_t> interesting_sizes() {
  return {0,  1,  2,  3,  7,   8,    9,     15,    16,    17,   31,
          33, 63, 64, 65, 127, 1003, 16383, 16384, 16385, 40001};
}

}  // namespace torchfuse::kernels::testing
