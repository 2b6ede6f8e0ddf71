// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// The CUDA runtime's stream handle, declared here so that host code needs no CUDA header.
struct CUstream_st;

namespace torchfuse::kernels {

using Stream = CUstream_st*;

}  // namespace torchfuse::kernels
