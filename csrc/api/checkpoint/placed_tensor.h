// SPDX-License-Identifier: BSD-3-Clause
// Tensors that several files hold, each a part of their elements.
//
// Note [Sharded checkpoints]
// A sharded checkpoint is a folder with an index.pt and a file for each rank, all in the format of
// save_checkpoint(). The index has two entries:
//
// - "checkpoint": what save_checkpoint() would write, but for the split states of optimizers. In
//   the place of their tensors are dicts with "dtype", "sizes", "strides" and "spans": a list of
//   (file, begin, end). The elements of a tensor, in the order in which they lie in memory, are cut
//   into spans, one behind the other.
// - "sharded": "format", "files", a list of pairs of name and bytes, and "optimizers", the names of
//   the parts that have such states.
//
// The file of a rank has for each of these names the tensors of its spans, of one dimension, under
// the keys of parameters and states. Only the index says that a file counts.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "api/checkpoint/values.h"

namespace torchfuse::checkpoint {

struct PlacedTensor {
  /// Elements [begin, end), in the order of memory.
  struct Span {
    std::size_t file;
    std::int64_t begin;
    std::int64_t end;
  };

  at::ScalarType dtype;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;  ///< without gaps
  std::vector<Span> spans;

  /// As an index has it.
  Dict to_dict() const;
  /// Checks what an index has.
  /// @param files how many there are.
  /// @param where "expected state[0]['exp_avg']", for error messages.
  static PlacedTensor of(const Dict& saved, std::size_t files, const std::string& where);

  std::int64_t numel() const;
  /// Whether its elements lie in memory in the order of a tensor's with the same sizes.
  bool is_laid_out_like(const at::Tensor& tensor) const;
};

}  // namespace torchfuse::checkpoint
