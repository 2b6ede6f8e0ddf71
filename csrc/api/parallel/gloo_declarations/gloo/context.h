// SPDX-License-Identifier: BSD-3-Clause
// See Note [Gloo without its headers].
#pragma once

#include <chrono>

namespace gloo {

struct Context {
  void setTimeout(std::chrono::milliseconds timeout);
};

}  // namespace gloo
