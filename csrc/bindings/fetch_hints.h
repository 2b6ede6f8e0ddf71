// SPDX-License-Identifier: BSD-3-Clause
// What a step will read next, from what the last one read.
#pragma once

#include <Python.h>

#include <c10/core/TensorImpl.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace torchfuse::bindings {

// Note [Hints]
// The objects of ten thousand parameters do not stay in the caches between steps, and each leads to
// the next: parameter, tensor, gradient, dictionary, state. A step that follows them waits for
// memory at every one. They mostly lie where they lay in the last step, so their addresses are
// kept, and asked for some parameters ahead. A hint is never followed: whatever lies there now, a
// prefetch reads no value and faults on no address.
class FetchHints {
 public:
  /// Where the last step found one parameter's objects.
  class Lines {
   public:
    void set(PyObject* param, const c10::TensorImpl* tensor, PyObject* state) {
      param_ = param;
      tensor_ = tensor;
      autograd_ = tensor->autograd_meta();
      grad_ = nullptr;
      state_ = state;
      entries_ = reinterpret_cast<PyDictObject*>(state)->ma_keys;
      num_values_ = 0;
    }
    void set_grad(const c10::TensorImpl* grad) { grad_ = grad; }
    void add_value(PyObject* value) {
      if (num_values_ < kValues) values_[num_values_++] = value;
    }

   private:
    friend class FetchHints;
    static constexpr std::uint32_t kValues = 6;

    const void* param_ = nullptr;
    const void* tensor_ = nullptr;
    const void* autograd_ = nullptr;
    const void* grad_ = nullptr;
    const void* state_ = nullptr;
    const void* entries_ = nullptr;
    std::uint32_t num_values_ = 0;
    std::array<const void*, kValues> values_{};
  };

  void resize(std::size_t params) { lines_.resize(params); }

  /// Those of a parameter, to be noted anew.
  Lines& of(std::size_t param) { return lines_[param]; }

  /// Asks for what is noted of a parameter that comes soon.
  void fetch(std::size_t param) const {
    if (param + kAhead >= lines_.size()) return;
    const Lines& lines = lines_[param + kAhead];
    __builtin_prefetch(lines.param_);
    __builtin_prefetch(lines.tensor_);
    __builtin_prefetch(lines.autograd_);
    __builtin_prefetch(lines.grad_);
    __builtin_prefetch(lines.state_);
    for (int line = 0; line < kEntriesBytes; line += 64) {
      __builtin_prefetch(static_cast<const char*>(lines.entries_) + line);
    }
    for (std::uint32_t i = 0; i < lines.num_values_; ++i) __builtin_prefetch(lines.values_[i]);
  }

 private:
  static constexpr std::size_t kAhead = 12;
  static constexpr int kEntriesBytes = 192;  ///< of a dictionary: header, index, four entries

  std::vector<Lines> lines_;
};

}  // namespace torchfuse::bindings
