// SPDX-License-Identifier: BSD-3-Clause
// A sharded checkpoint that is being loaded: see Note [Sharded checkpoints].
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "api/checkpoint/placed_tensor.h"
#include "api/checkpoint/span_reader.h"
#include "api/checkpoint/values.h"

namespace torchfuse::parallel {
class Shards;
}

namespace torchfuse::checkpoint {

inline constexpr std::int64_t kShardedFormat = 1;

std::string index_of(const std::string& folder);

class ShardedInput {
 public:
  /// Reads the index, and looks for the files that it names.
  /// @throws c10::ValueError naming the file that is missing, truncated, damaged or of another
  ///   kind.
  ShardedInput(const std::string& folder, const std::string& caller);

  /// What no other save has: the name of its first file.
  std::string save() const;
  /// What save_checkpoint() would have written, but for split states.
  const Dict& contents() const { return contents_; }
  /// Whether a part has split states.
  bool has(const std::string& name) const;
  /// The state dict of a split optimizer's parts in this process, of what contents() have for it.
  Dict own_state(const std::string& name, const c10::IValue& saved, const parallel::Shards& shards);
  /// The state dict of an optimizer that is not split.
  Dict whole_state(const std::string& name, const c10::IValue& saved);

 private:
  ShardedInput(const std::string& folder, const std::string& caller, const Dict& index);
  PlacedTensor placed(const Dict& place, const SpanReader::Keys& keys) const;
  at::Tensor own_part(const parallel::Shards& shards, std::size_t index, const Dict& place,
                      const SpanReader::Keys& keys);

  Dict sharded_;
  Dict contents_;
  SpanReader reader_;
};

}  // namespace torchfuse::checkpoint
