// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>

namespace torchfuse {

/// What a step stores in the gradients. A bool stands for kClipped or kNothing.
class WriteBackGrads {
 public:
  /// The choices.
  enum Value : std::uint8_t {
    kNothing,  ///< gradients keep the loss scale
    /// Gradients without the loss scale, as torch's scaler leaves them, also in a step that is
    /// skipped; nothing where there is no scale.
    kUnscaled,
    kClipped,  ///< unscaled and clipped gradients; nothing in a step that is skipped
  };
  /// Converts a choice.
  constexpr WriteBackGrads(Value value) noexcept : value_(value) {}  // NOLINT
  /// Converts true to kClipped, and false to kNothing.
  constexpr WriteBackGrads(bool clipped) noexcept  // NOLINT
      : value_(clipped ? kClipped : kNothing) {}

  /// Returns the choice.
  constexpr Value value() const noexcept { return value_; }
  /// Compares the choices.
  constexpr bool operator==(const WriteBackGrads&) const noexcept = default;

 private:
  Value value_;
};

}  // namespace torchfuse
