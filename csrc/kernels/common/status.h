// SPDX-License-Identifier: BSD-3-Clause
// A launcher's result. Kernels never throw: `ops` turns a failure into an exception.
#pragma once

namespace torchfuse::kernels {

/// `error` is a cudaError_t value (0 is success); `what` names the call that failed.
struct Status {
  int error = 0;
  const char* what = "";

  bool ok() const { return error == 0; }
};

}  // namespace torchfuse::kernels
