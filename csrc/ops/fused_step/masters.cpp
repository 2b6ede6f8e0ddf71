// SPDX-License-Identifier: BSD-3-Clause
#include <torchfuse/masters.h>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include "ops/check.h"

namespace torchfuse {

at::Tensor master_of_remainder(const at::Tensor& param, const at::Tensor& remainder) {
  constexpr const char* kName = "master_of_remainder";
  TORCH_CHECK(param.scalar_type() == at::kBFloat16, kName,
              ": expected param to be of dtype bfloat16, got ", param.scalar_type(), ".");
  TORCH_CHECK(remainder.scalar_type() == at::kShort, kName,
              ": expected remainder to be of dtype int16, got ", remainder.scalar_type(), ".");
  ops::check_same_sizes({kName, "remainder"}, remainder, param, "param");
  // Widening shifts the bits. If the sum is NaN, the pair represents no master: see Note [Parameter
  // remainders].
  const at::Tensor upper = param.detach().to(at::kFloat);
  const at::Tensor sum = upper.view(at::kInt).add(remainder).view(at::kFloat);
  return at::where(sum.isnan(), upper, sum);
}

namespace {

/// Clears remainders that do not extend their parameter. See Note [Parameter remainders].
void remake_remainder(const at::Tensor& param, const at::Tensor& remainder) {
  const at::Tensor sum = param.to(at::kFloat).view(at::kInt).add_(remainder).view(at::kFloat);
  remainder.masked_fill_(sum.isnan(), 0);
}

}  // namespace

// Note [Masters follow their parameters]
// A program may write to a 16-bit parameter between steps: clamp it, load weights, average models.
// The next step would undo such a write, because it starts from the fp32 master. The master adds
// information only where it rounds to the parameter, so every other element of the master is set to
// the parameter. Where the master does round to the parameter, every bit is kept. Writing the same
// values, as when loading a checkpoint in any order or gathering shards, therefore loses nothing. A
// remainder extends the parameter's own bits and needs no such care.
void remake_master(const at::Tensor& param, const at::Tensor& master) {
  constexpr const char* kName = "remake_master";
  const at::NoGradGuard no_grad;
  if (master.scalar_type() == at::kShort) {
    TORCH_CHECK(param.scalar_type() == at::kBFloat16, kName,
                ": expected param to be of dtype bfloat16 with a remainder, got ",
                param.scalar_type(), ".");
    ops::check_same_sizes({kName, "remainder"}, master, param, "param");
    return remake_remainder(param, master);
  }
  TORCH_CHECK(param.scalar_type() == at::kBFloat16 || param.scalar_type() == at::kHalf, kName,
              ": expected param to be of dtype float16 or bfloat16, got ", param.scalar_type(),
              ".");
  TORCH_CHECK(master.scalar_type() == at::kFloat, kName,
              ": expected master to be of dtype float32 or int16, got ", master.scalar_type(), ".");
  ops::check_same_sizes({kName, "master"}, master, param, "param");
  at::Tensor stale = master.to(param.scalar_type()).ne(param);
  if (param.scalar_type() == at::kBFloat16) {
    // If a master comes from a remainder and lies halfway, its parameter was rounded away from
    // zero.
    const at::Tensor bits = master.view(at::kInt);
    const at::Tensor away = bits.bitwise_right_shift(16).add_(1).to(at::kShort);
    const at::Tensor halfway = bits.bitwise_and(0xffff).eq(0x8000);
    stale.logical_and_(halfway.logical_and_(away.eq(param.view(at::kShort))).logical_not_());
  }
  master.copy_(at::where(stale, param.to(at::kFloat), master));
}

void take_master(const at::Tensor& param, const at::Tensor& master) {
  constexpr const char* kName = "take_master";
  const at::NoGradGuard no_grad;
  const at::ScalarType wide = param.scalar_type();
  TORCH_CHECK(wide == at::kFloat || wide == at::kDouble, kName,
              ": expected param to be of dtype float32 or float64, got ", wide, ".");
  ops::check_same_sizes({kName, "master"}, master, param, "param");
  const bool is_remainder = master.scalar_type() == at::kShort;
  // The parameter's former dtype is unknown, so try both.
  for (const at::ScalarType before : {at::kBFloat16, at::kHalf}) {
    if (is_remainder && before == at::kHalf) break;
    const at::Tensor narrow = param.to(before);
    const at::Tensor value = is_remainder ? master_of_remainder(narrow, master) : master.clone();
    if (!is_remainder) remake_master(narrow, value);
    const at::Tensor written = narrow.to(wide).ne(param);
    if (!is_remainder) written.logical_or_(value.ne(master));
    param.detach().copy_(at::where(written, param, value.to(wide)));
  }
}

at::Tensor remainder_of_master(const at::Tensor& master) {
  TORCH_CHECK(master.scalar_type() == at::kFloat,
              "remainder_of_master: expected master to be of dtype float32, got ",
              master.scalar_type(), ".");
  const at::Tensor value = master.detach();
  const at::Tensor bits = value.view(at::kInt);
  at::Tensor lower = bits.bitwise_and(0xffff);
  lower.sub_(lower.ge(0x8000).to(at::kInt).mul_(0x10000));
  // A halfway master was rounded down if the last bit that the parameter keeps is 0.
  const at::Tensor down = lower.eq(-0x8000).logical_and_(bits.bitwise_and(0x10000).eq(0));
  lower.masked_fill_(down, 0x7fff);
  lower.masked_fill_(value.isnan(), 0);
  return lower.to(at::kShort);
}

}  // namespace torchfuse
