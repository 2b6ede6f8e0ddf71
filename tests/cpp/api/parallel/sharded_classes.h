// SPDX-License-Identifier: BSD-3-Clause
// How the states of every class may be stored, and all of them by name.
#pragma once

#include <torch/torch.h>
#include <torchfuse/torchfuse.h>

#include <string>
#include <utility>
#include <vector>

#include "../optim/all_classes.h"

namespace torchfuse::sharded_testing {

struct Storage {
  const char* name;
  torch::ScalarType dtype;
  bool masters;
  bool remainders;
  bool averages;
};

inline const std::vector<Storage>& storages() {
  static const std::vector<Storage> all{
      {"fp32", torch::kFloat, false, false, false},
      {"fp64", torch::kDouble, false, false, true},
      {"bf16", torch::kBFloat16, false, false, true},
      {"masters", torch::kHalf, true, false, false},
      {"remainders", torch::kBFloat16, true, true, false},
  };
  return all;
}

template <class Options>
Options options_with(const Storage& storage) {
  Options options = testing::all_states<Options>();
  options.weight_decay(0.1).master_weights(storage.masters);
  options.store_param_remainders(storage.remainders);
  if (storage.averages) options.ema_decay(0.9);
  return options;
}

/// All tensors of the state dict, in the order of parameters and names.
inline std::vector<std::pair<std::string, torch::Tensor>> tensors_of(
    const optim::FusedOptimizer& from) {
  std::vector<std::pair<std::string, torch::Tensor>> found;
  const auto states = from.state_dict().at("state").toGenericDict();
  for (const auto& entry : states) {
    for (const auto& value : entry.value().toGenericDict()) {
      found.emplace_back(c10::str(entry.key(), ".", value.key().toStringRef()),
                         value.value().toTensor());
    }
  }
  return found;
}

}  // namespace torchfuse::sharded_testing
