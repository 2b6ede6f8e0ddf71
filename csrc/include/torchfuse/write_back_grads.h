// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>

namespace torchfuse {

/// Which values a step stores in the gradients. A bool converts: true is kClipped, false is
/// kNothing.
class WriteBackGrads {
 public:
  /// The choices.
  enum Value : std::uint8_t {
    kNothing,  ///< gradients keep the loss scale
    /// gradients without the loss scale, as torch's scaler leaves them, also in a skipped step;
    /// stores nothing if there is no scale
    kUnscaled,
    kClipped,  ///< unscaled and clipped gradients; stores nothing in a skipped step
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
