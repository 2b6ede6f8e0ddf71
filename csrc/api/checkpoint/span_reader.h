// SPDX-License-Identifier: BSD-3-Clause
// The files of ranks in a sharded checkpoint: see Note [Sharded checkpoints].
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "api/checkpoint/placed_tensor.h"

namespace torchfuse::checkpoint {

/// Reads elements of placed tensors. All that are wanted are read together, from one open file
/// after the other, and of the files only the tensors that hold such elements.
class SpanReader {
 public:
  /// Part, parameter and state: where files of ranks have a tensor.
  using Keys = std::array<c10::IValue, 3>;

  /// Checks that all files are there, of the sizes that the index says.
  /// @param files pairs of name and bytes, as the index has them.
  SpanReader(std::string folder, const c10::IValue& files, std::string caller);

  std::size_t files() const { return paths_.size(); }
  /// Elements [begin, end), one behind the other; they have their values after read().
  at::Tensor want(const PlacedTensor& placed, const Keys& keys, std::int64_t begin,
                  std::int64_t end);
  /// A whole tensor, likewise.
  at::Tensor want(const PlacedTensor& placed, const Keys& keys);
  /// Reads what was wanted since the last call.
  void read();

 private:
  struct Wanted {
    Keys keys;
    PlacedTensor::Span span;
    std::int64_t begin;  ///< of the elements that are wanted
    at::Tensor target;
  };

  std::string folder_;
  std::string caller_;
  std::vector<std::string> paths_;
  std::map<std::size_t, std::vector<Wanted>> wanted_;  ///< by file
};

}  // namespace torchfuse::checkpoint
