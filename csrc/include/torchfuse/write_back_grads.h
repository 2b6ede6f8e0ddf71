// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>

namespace torchfuse {

/// What a step stores in the gradients. A bool stands for kClipped or kNothing.
class WriteBackGrads {
 public:
  enum Value : std::uint8_t {
    kNothing,   ///< nothing: gradients keep the loss scale
    kUnscaled,  ///< gradients without the loss scale, as torch's scaler leaves them; if there is
                ///< none, nothing. Also in a step that is skipped.
    kClipped,   ///< unscaled and clipped gradients; nothing in a step that is skipped
  };
  constexpr WriteBackGrads(Value value) noexcept : value_(value) {}  // NOLINT
  constexpr WriteBackGrads(bool clipped) noexcept                    // NOLINT
      : value_(clipped ? kClipped : kNothing) {}

  constexpr Value value() const noexcept { return value_; }
  constexpr bool operator==(const WriteBackGrads&) const noexcept = default;

 private:
  Value value_;
};

}  // namespace torchfuse
