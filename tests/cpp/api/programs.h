// SPDX-License-Identifier: BSD-3-Clause
/// Programs that tests in Python start, in one executable: torchfuse_programs NAME ARGUMENT...
#pragma once

#include <torch/torch.h>

#include <string>
#include <vector>

using Arguments = std::vector<std::string>;

/// Values that programs and their tests in Python know.
inline torch::Tensor wave(at::IntArrayRef sizes, double shift) {
  const auto count = c10::multiply_integers(sizes);
  return torch::sin(torch::arange(count, torch::kDouble) * 0.7 + shift).reshape(sizes);
}

/// @{ Each runs the program in the file of its name; throws what the user has to know.
namespace autocast_program {
void start(const Arguments& arguments);
}
namespace data_parallel_program {
void start(const Arguments& arguments);
}
namespace optimizers_program {
void start(const Arguments& arguments);
}
namespace ranks_program {
void start(const Arguments& arguments);
}
namespace scheduler_program {
void start(const Arguments& arguments);
}
namespace sharded_program {
void start(const Arguments& arguments);
}
namespace train_program {
void start(const Arguments& arguments);
}
namespace weights_program {
void start(const Arguments& arguments);
}
/// @}
