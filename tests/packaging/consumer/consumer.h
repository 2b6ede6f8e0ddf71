// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>

/// Ends the program unless `condition` holds.
#define EXPECT(condition, ...)                                                                \
  do {                                                                                        \
    if (!(condition)) {                                                                       \
      std::fprintf(stderr, "consumer: %s:%d: expected %s: ", __FILE__, __LINE__, #condition); \
      std::fprintf(stderr, __VA_ARGS__);                                                      \
      std::fputc('\n', stderr);                                                               \
      std::exit(1);                                                                           \
    }                                                                                         \
  } while (false)

/// Exactly these ops are registered in the namespace torchfuse.
void check_ops(const std::set<std::string>& expected);
/// Steps give the values of the formula, an overflow is skipped.
void check_training();
void check_autocast();
/// Classes derived from ours, casts and exceptions across the library's boundary.
void check_extension();
