// SPDX-License-Identifier: BSD-3-Clause
#include "api/checkpoint/utf8.h"

#include <array>
#include <bit>
#include <cstdint>

namespace torchfuse::checkpoint {

bool is_utf8(std::string_view text, bool surrogates) {
  constexpr std::array<std::uint32_t, 4> kLeast{0, 0x80, 0x800, 0x10000};
  for (std::size_t i = 0; i < text.size();) {
    const auto lead = static_cast<unsigned char>(text[i++]);
    const int ones = std::countl_one(lead);
    if (ones == 1 || ones > 4) return false;
    std::uint32_t code = lead & (0x7fU >> ones);
    for (int more = 1; more < ones; ++more, ++i) {
      if (i == text.size() || (text[i] & 0xc0) != 0x80) return false;
      code = (code << 6) | (text[i] & 0x3fU);
    }
    if (code > 0x10ffff || (ones > 0 && code < kLeast[ones - 1])) return false;
    if (!surrogates && code >= 0xd800 && code <= 0xdfff) return false;
  }
  return true;
}

}  // namespace torchfuse::checkpoint
