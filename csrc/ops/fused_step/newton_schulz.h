// SPDX-License-Identifier: BSD-3-Clause
// Orthogonalizes batches of matrices, for Muon.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <vector>

namespace torchfuse::ops {

/// One Newton-Schulz iteration has the coefficients a, b and c:
///
///     x <- a x + (b A + c A A) x,   A = x x^T
///
/// It maps every singular value s of x to a s + b s^3 + c s^5, and leaves the singular vectors. A
/// few iterations bring all singular values, at most 1 at the start, near 1.
struct NewtonSchulz {
  std::vector<std::array<double, 3>> iterations;
  double eps = 1e-7;    ///< each matrix is first divided by its Frobenius norm, or by eps if larger
  double margin = 1.0;  ///< and by this number
  bool batched = true;  ///< whether products may take several matrices

  bool operator==(const NewtonSchulz&) const = default;
};

/// Returns `steps` equal iterations.
NewtonSchulz equal_iterations(const std::array<double, 3>& coefficients, int steps, double eps);

/// Returns the first `steps` iterations of Polar Express (Amsel et al. 2025, "The Polar Express:
/// optimal matrix sign methods and their application to the Muon algorithm", Algorithm 1), which
/// differ. Further iterations repeat the last one.
NewtonSchulz polar_express(int steps, double eps);

/// Orthogonalizes `matrices`, of shape [count, m, n] and contiguous, in place and in their dtype.
/// At most `at_a_time` matrices take part in a product. Besides the matrices, a product needs
/// memory for m n + 2 min(m, n)^2 elements per matrix.
void newton_schulz_(const at::Tensor& matrices, const NewtonSchulz& settings,
                    std::int64_t at_a_time);

}  // namespace torchfuse::ops
