// SPDX-License-Identifier: BSD-3-Clause
// Trains with the headers and the library of torchfuse, and checks what it gets.
#include <ATen/ops/full.h>
#include <torchfuse/cpu_isa.h>
#include <torchfuse/ops.h>
#include <torchfuse/version.h>

#include <cstdio>

#include "consumer.h"

namespace {

void check_functions() {
  const auto [norm, found_inf] = torchfuse::multi_tensor_l2_norm({at::full({16}, 3.0)});
  EXPECT(norm.item<double>() == 12.0, "%g", norm.item<double>());
  EXPECT(found_inf.item<double>() == 0.0, "%g", found_inf.item<double>());
  torchfuse::set_cpu_isa("baseline");
  EXPECT(torchfuse::cpu_isa() == "baseline", "%s", torchfuse::cpu_isa().c_str());
}

}  // namespace

int main() {
  check_ops({CONSUMER_OPS});
  check_training();
  check_autocast();
  check_functions();
  check_extension();
  std::printf("consumer: trained with torchfuse %s, built with torch %s\n", TORCHFUSE_VERSION,
              TORCHFUSE_TORCH_VERSION);
  return 0;
}
