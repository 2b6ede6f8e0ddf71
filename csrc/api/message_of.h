// SPDX-License-Identifier: BSD-3-Clause
// What exceptions say, for messages that quote them.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <new>
#include <string>

namespace torchfuse {

/// The message of an exception without C++ backtraces, which torch's what() and some messages of
/// c10d contain.
inline std::string message_of(const std::exception& error) {
  const auto* from_torch = dynamic_cast<const c10::Error*>(&error);
  std::string message = from_torch != nullptr ? from_torch->what_without_backtrace() : error.what();
  message.erase(std::min(message.find("\nException raised from"), message.size()));
  return message;
}

/// The same without the period at its end, for a message that continues the sentence.
inline std::string clause_of(const std::exception& error) {
  std::string message = message_of(error);
  while (!message.empty() && (message.back() == '\n' || message.back() == '.')) message.pop_back();
  return message;
}

/// Whether memory ran out, on a device or on the host, whose allocator has no class for it.
inline bool is_out_of_memory(const std::exception& error) {
  return dynamic_cast<const std::bad_alloc*>(&error) != nullptr ||
         dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr ||
         message_of(error).find("can't allocate memory") != std::string::npos;
}

}  // namespace torchfuse
