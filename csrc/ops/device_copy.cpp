// SPDX-License-Identifier: BSD-3-Clause
#include <torchfuse/device_copy.h>

namespace torchfuse {

at::Tensor to_device(const at::Tensor& tensor, const at::Device& device) {
  return tensor.to(device, /*non_blocking=*/device.is_cuda());
}

}  // namespace torchfuse
