// SPDX-License-Identifier: BSD-3-Clause
// What calls throw.
#pragma once

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <string>

namespace torchfuse::testing {

/// Without a backtrace.
template <class Function>
std::string error_of(const Function& function) {
  try {
    function();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

/// The message contains `text`.
template <class Function>
void expect_error(const Function& function, const std::string& text) {
  EXPECT_PRED_FORMAT2(::testing::IsSubstring, text, error_of(function));
}

}  // namespace torchfuse::testing
