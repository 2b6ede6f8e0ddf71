// SPDX-License-Identifier: BSD-3-Clause
// A device over the host's memory that runs behind the host, as CUDA does: what is copied towards
// the host without waiting does not arrive. Results on the host are right only if nobody does that.
#pragma once

#include <torch/torch.h>

#include <cstdint>

namespace torchfuse::testing {

/// Torch's place for devices of others.
inline torch::Device late_device() { return {torch::kPrivateUse1, 0}; }

/// How many copies from the host to the device there were. On CUDA the host may wait for each.
std::int64_t copies_from_host();

/// A number there, fp32 and 0-dim.
inline torch::Tensor late_scalar(double value) {
  return torch::full({}, value, torch::TensorOptions().dtype(torch::kFloat).device(late_device()));
}

}  // namespace torchfuse::testing
