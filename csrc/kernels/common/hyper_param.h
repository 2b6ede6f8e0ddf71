// SPDX-License-Identifier: BSD-3-Clause
// A hyper-parameter that a kernel reads: by value, or through a pointer so that a schedule on the
// device (or a fill_ between replays of a captured graph) is seen without a new launch setup.
#pragma once

#include "kernels/common/dtype.h"

namespace torchfuse::kernels {

struct HyperParam {
  double value = 0.0;
  const void* pointer = nullptr;  ///< one float or double on the launch's device, or null
  DType dtype = DType::kFloat32;  ///< of `pointer`: kFloat32 or kFloat64

  TORCHFUSE_HOST_DEVICE double load() const {
    if (pointer == nullptr) return value;
    if (dtype == DType::kFloat64) return *static_cast<const double*>(pointer);
    return static_cast<double>(*static_cast<const float*>(pointer));
  }
};

}  // namespace torchfuse::kernels
