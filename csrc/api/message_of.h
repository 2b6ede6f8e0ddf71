// SPDX-License-Identifier: BSD-3-Clause
// Exception messages, for other messages that quote them.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <new>
#include <string>

namespace torchfuse {

/// Returns an exception's message without the C++ backtraces that torch's what() and some c10d
/// messages contain.
inline std::string message_of(const std::exception& error) {
  const auto* from_torch = dynamic_cast<const c10::Error*>(&error);
  std::string message = from_torch != nullptr ? from_torch->what_without_backtrace() : error.what();
  message.erase(std::min(message.find("\nException raised from"), message.size()));
  return message;
}

/// Returns message_of() without the final period, for a message that continues the sentence.
inline std::string clause_of(const std::exception& error) {
  std::string message = message_of(error);
  while (!message.empty() && (message.back() == '\n' || message.back() == '.')) message.pop_back();
  return message;
}

/// Returns whether memory ran out on a device or the host. torch's host allocator throws a plain
/// c10::Error, which only the message identifies.
inline bool is_out_of_memory(const std::exception& error) {
  return dynamic_cast<const std::bad_alloc*>(&error) != nullptr ||
         dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr ||
         message_of(error).find("can't allocate memory") != std::string::npos;
}

}  // namespace torchfuse
